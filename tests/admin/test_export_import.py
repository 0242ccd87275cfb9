"""Chunks out of a store and into another: the same KV, and nothing that is not checked."""

from __future__ import annotations

import errno
import io
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheblend_rag.admin import export_import
from cacheblend_rag.admin.select import Choice, named
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import TieredKVStore, codec
from tests.kv.samples import make_key, make_kv, same

KEYS = [make_key(number) for number in range(4)]
ALL = Choice().condition(None)


@pytest.fixture
def store(tmp_path: Path) -> TieredKVStore:
    store = TieredKVStore.open(host_bytes=0, kv_path=tmp_path / "from")
    for number, key in enumerate(KEYS):
        store.put(key, make_kv(number), written_at=time.time() - 1000)
    return store


@pytest.fixture
def other(tmp_path: Path) -> TieredKVStore:
    return TieredKVStore.open(host_bytes=0, kv_path=tmp_path / "to")


@pytest.mark.parametrize("name", ["moved", "moved.tar"])
def test_what_is_exported_can_be_imported(
    store: TieredKVStore, other: TieredKVStore, tmp_path: Path, name: str
) -> None:
    out = export_import.export(store, named(map(str, KEYS[:3])), tmp_path / name)
    back = export_import.import_chunks(other, tmp_path / name)
    assert (out.moved, back.moved, out.skipped, back.skipped) == (3, 3, {}, {})
    assert out.nbytes == back.nbytes
    for number, key in enumerate(KEYS[:3]):
        found = other.get(key).kv
        assert found is not None
        assert same(found, make_kv(number))
        then = store.entries()[key].written_at
        assert other.entries()[key].written_at == pytest.approx(then, abs=1.1)
    assert not other.contains(KEYS[3])


def test_what_is_damaged_is_not_exported_and_told(store: TieredKVStore, tmp_path: Path) -> None:
    (path,) = (tmp_path / "from").glob(f"?/?/{KEYS[0]}.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    report = export_import.export(store, ALL, tmp_path / "moved")
    assert (report.moved, report.skipped) == (3, {str(KEYS[0]): "damaged"})


def test_nothing_is_written_over(store: TieredKVStore, tmp_path: Path) -> None:
    for name in ("moved", "moved.tar"):
        export_import.export(store, ALL, tmp_path / name)
        with pytest.raises(StoreError, match="exists already"):
            export_import.export(store, ALL, tmp_path / name)


GOOD = codec.encode(KEYS[0], make_kv(0))
HOSTILE: list[tuple[str, bytes, str]] = [
    (f"../{KEYS[0]}.safetensors", GOOD, "its name is not a KV key"),
    (f"/srv/{KEYS[0]}.safetensors", GOOD, "its name is not a KV key"),
    ("../../etc/passwd", b"root", "its name is not a KV key"),
    (f"{KEYS[0]}.pkl", b"\x80\x04.", "its name is not a KV key"),
    (f"{KEYS[1]}.safetensors", GOOD, f"holds {KEYS[0]}"),
    (f"{KEYS[0]}.safetensors", GOOD[:-1] + bytes([GOOD[-1] ^ 1]), "checksum"),
    (f"{KEYS[0]}.safetensors", b"", "empty"),
]


def tar_of(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize(("name", "data", "reason"), HOSTILE)
def test_what_is_foreign_is_left_out_by_name(
    other: TieredKVStore, tmp_path: Path, name: str, data: bytes, reason: str
) -> None:
    before = {*tmp_path.rglob("*")}
    good = tarfile.TarInfo(f"{KEYS[2]}.safetensors")
    fine = codec.encode(KEYS[2], make_kv(2))
    tar = tar_of(tmp_path / "in.tar", (tarfile.TarInfo(name), data), (good, fine))
    report = export_import.import_chunks(other, tar)
    assert report.moved == 1
    assert list(report.skipped) == [name]
    assert reason in report.skipped[name]
    assert other.keys() == [KEYS[2]]
    new = {path for path in {*tmp_path.rglob("*")} - before if path.is_file()}
    assert all(path.is_relative_to(tmp_path / "to") or path == tar for path in new)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_pipes_in_a_tar_are_not_read(
    other: TieredKVStore, tmp_path: Path, kind: bytes
) -> None:
    member = tarfile.TarInfo(f"{KEYS[0]}.safetensors")
    member.type, member.linkname = kind, "/etc/passwd"
    report = export_import.import_chunks(other, tar_of(tmp_path / "in.tar", (member, b"")))
    assert (report.moved, [*report.skipped.values()]) == (0, ["no file"])


@pytest.mark.parametrize(
    "plant",
    [
        lambda path: path.symlink_to("/etc/passwd"),
        os.mkfifo,
        lambda path: path.mkdir(),
    ],
)
def test_links_and_pipes_in_a_folder_are_not_read(
    other: TieredKVStore, tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    plant(folder / f"{KEYS[0]}.safetensors")
    report = export_import.import_chunks(other, folder)
    assert report.moved == 0
    assert len(report.skipped) == 1


def test_what_claims_to_be_of_another_time_is_of_now_at_most(
    other: TieredKVStore, tmp_path: Path
) -> None:
    for number, claimed in enumerate((4e9, -5.0)):
        member = tarfile.TarInfo(f"{KEYS[number]}.safetensors")
        member.mtime = claimed
        data = codec.encode(KEYS[number], make_kv(number))
        report = export_import.import_chunks(
            other, tar_of(tmp_path / f"{number}.tar", (member, data))
        )
        assert report.moved == 1
    assert other.entries()[KEYS[0]].written_at <= time.time() + 1
    assert other.entries()[KEYS[1]].written_at == 0


def test_an_import_is_bounded(store: TieredKVStore, other: TieredKVStore, tmp_path: Path) -> None:
    out = export_import.export(store, ALL, tmp_path / "moved.tar")
    report = export_import.import_chunks(other, tmp_path / "moved.tar", out.nbytes - 1)
    assert report.moved == 3
    assert [*report.skipped.values()] == ["exceeds the given limit"]


def test_a_tar_that_ends_early_is_one_error(store: TieredKVStore, tmp_path: Path) -> None:
    tar = tmp_path / "moved.tar"
    export_import.export(store, ALL, tar)
    tar.write_bytes(tar.read_bytes()[:1000])
    with TieredKVStore.open(host_bytes=0, kv_path=tmp_path / "to") as other:
        try:
            report = export_import.import_chunks(other, tar)
        except StoreError as error:
            assert "cannot be read" in str(error)  # noqa: PT017 - either is sound
        else:
            assert report.moved == 0
        assert not other.keys()
    (tmp_path / "text").write_text("A report.")
    for nothing in ("text", "none"):
        with pytest.raises(StoreError):
            export_import.import_chunks(store, tmp_path / nothing)


class FullDisk(io.FileIO):
    """A file on a full disk."""

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["moved", "moved.tar"])
def test_an_export_that_fails_leaves_nothing_in_the_next_ones_way(
    store: TieredKVStore, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out" / name
    with monkeypatch.context() as full:
        full.setattr(export_import.os, "fdopen", lambda fd, mode: FullDisk(fd, "wb"))
        with pytest.raises(StoreError, match=f"{name} cannot be written: No space left on device$"):
            export_import.export(store, ALL, target)
    assert list(target.parent.iterdir()) == []
    assert export_import.export(store, ALL, target).moved == len(KEYS)
    with pytest.raises(StoreError, match="exists already: give another name"):
        export_import.export(store, ALL, target)
    assert [path.name for path in target.parent.iterdir()] == [name]


@pytest.mark.parametrize("name", ["moved", "moved.tar"])
def test_what_appears_while_it_is_exported_stays(
    store: TieredKVStore, tmp_path: Path, name: str
) -> None:
    target = tmp_path / name

    def appears(*_: object) -> bool:
        target.write_text("another's")
        return True

    with pytest.raises(StoreError, match="exists already"):
        export_import.export(store, appears, target)
    assert target.read_text() == "another's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from", name]
