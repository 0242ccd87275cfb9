"""Ask a document that is longer than the context, window by window, on the bundled model.

Run it with ``python examples/long_document.py``; it needs no GPU and downloads nothing.
"""

from tempfile import TemporaryDirectory

from cacheblend_rag import SamplingParams, analyze_long_document, open_engine
from cacheblend_rag.demo.corpus import INSTRUCTION, generate_collection

GREEDY = SamplingParams.greedy(max_tokens=8)


def main() -> None:
    """Ask two questions about twenty-four notes, which are one document here."""
    notes, questions = generate_collection(documents=24, questions=2, seed=5)
    document = "\n\n".join(note.text for note in notes)

    with TemporaryDirectory() as folder:
        engine = open_engine(
            "transformers", model="demo", instruction=f"{INSTRUCTION}\n\n", kv_path=folder
        )
        for asked in questions:
            analysis = analyze_long_document(
                engine, document, asked.question, chunk_tokens=256, overlap=64, sampling=GREEDY
            )
            plan = analysis.report
            print(f"\n{asked.question}  (right answer: {asked.answer})")
            print(f"{plan.tokens} tokens, {plan.windows} windows of {plan.window} chunks")
            for answer in analysis:
                print(f"  {answer.start:6} to {answer.end:6}: {answer.text}")
            done = analysis.report
            print(
                f"chunks computed: {done.computed_chunks} of {done.chunks}, tokens reused: "
                f"{done.reused_tokens} of {done.prompt_tokens}"
            )
        engine.close()


if __name__ == "__main__":
    main()
