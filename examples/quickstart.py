"""Index documents once, then answer from their stored KV: the whole path, on the bundled model.

Run it with ``python examples/quickstart.py``; it needs no GPU and downloads nothing.
"""

from cacheblend_rag import BlendConfig, Document, SamplingParams, TieredKVStore, TransformersEngine
from cacheblend_rag.demo import MODEL_FOLDER
from cacheblend_rag.demo.corpus import INSTRUCTION, generate_collection

DOCUMENTS_IN_A_PROMPT = 5


def main() -> None:
    """Answer three questions by ordinary prefill and from contextual chunk KV."""
    collection, questions = generate_collection(documents=24, questions=3, seed=5)
    documents = [Document(d.document_id, d.chunks) for d in collection]

    engine = TransformersEngine(
        MODEL_FOLDER,
        config=BlendConfig(recompute_ratio=0.0),
        lead_in="document",
        store=TieredKVStore.open(host_bytes=1 << 30),
        instruction=f"{INSTRUCTION}\n\n",
    )
    report = engine.precompute(documents)
    print(f"indexed {report.computed} chunks in {report.seconds:.1f} s")

    for question in questions:
        # A retriever would choose the documents; here they stand around the one that answers.
        first = max(0, min(question.document - 2, len(documents) - DOCUMENTS_IN_A_PROMPT))
        retrieved = documents[first : first + DOCUMENTS_IN_A_PROMPT]
        passages = "\n\n".join(chunk for document in retrieved for chunk in document.chunks)
        prompt = f"{INSTRUCTION}\n\n{passages}\n\nQuestion: {question.question}\nAnswer:"

        full = engine.generate_full(prompt, SamplingParams.greedy(max_tokens=8))
        fused = engine.generate(prompt, SamplingParams.greedy(max_tokens=8))
        sooner = full.report.seconds.time_to_first_token / fused.report.seconds.time_to_first_token
        print(f"\n{question.question}  (right answer: {question.answer})")
        print(f"  ordinary prefill:{full.text}")
        print(
            f"  contextual KV:   {fused.text}  "
            f"[{fused.report.reused_tokens} of {fused.report.prompt_tokens} tokens reused, "
            f"first token {sooner:.1f}x sooner]"
        )


if __name__ == "__main__":
    main()
