"""Small files to index: the demo's documents as text, and a PDF written by hand."""

from __future__ import annotations

from pathlib import Path

from tests.toy import DemoQuestion, generate_collection


def write_notes(folder: Path, count: int = 4, questions: int = 2) -> list[DemoQuestion]:
    """Write ``count`` documents of the demo's corpus as text files; return questions about them."""
    documents, asked = generate_collection(count, questions, seed=3)
    folder.mkdir(parents=True, exist_ok=True)
    for document in documents:
        (folder / f"{document.document_id}.txt").write_text(document.text)
    return asked


def pdf_bytes(*pages: str) -> bytes:
    """Return a PDF with one line of text a page."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        objects += [
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R"
            f" >> >> /Contents {5 + 2 * number} 0 R >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    file, starts = "%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        starts.append(len(file))
        file += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{start:010} 00000 n \n" for start in starts)
    size = len(objects) + 1
    return (
        f"{file}xref\n0 {size}\n0000000000 65535 f \n{table}"
        f"trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n{len(file)}\n%%EOF\n"
    ).encode()
