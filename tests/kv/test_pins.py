"""Pins outlive a process where a folder keeps them, and cannot be forged into anything else."""

import os

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import DiskTier, HostTier, TieredKVStore, TierPolicy
from cacheblend_rag.kv.tiers import files as pins
from cacheblend_rag.kv.tiers.files import PinFile

from .samples import make_key, make_kv

KEYS = [make_key(number) for number in range(5)]


@pytest.fixture
def folder(tmp_path):
    """Of a store with two chunks."""
    with TieredKVStore([DiskTier(tmp_path)]) as store:
        for number in (0, 1):
            store.put(KEYS[number], make_kv(number))
    return tmp_path


def room_for_two(folder):
    """A tier, as another process opens it, that has room for two chunks."""
    size = next(folder.rglob("*.safetensors")).stat().st_size
    return DiskTier(folder, policy=TierPolicy(2 * size, admit="always"))


def held(folder):
    return {number for number, key in enumerate(KEYS) if DiskTier(folder).contains(key)}


def test_what_one_process_pins_no_other_one_evicts(folder):
    with TieredKVStore([room_for_two(folder)]) as other:  # open before it is pinned
        DiskTier(folder).pin(KEYS[0])
        for number in (2, 3):
            assert other.put(KEYS[number], make_kv(number))
        assert held(folder) == {0, 3}
        DiskTier(folder).unpin(KEYS[0])
        assert other.put(KEYS[4], make_kv(4))
        assert other.put(KEYS[1], make_kv(1))
        assert held(folder) == {1, 4}


def test_what_is_pinned_in_a_folder_does_not_expire_in_memory_either(folder, clock):
    with TieredKVStore([HostTier(), DiskTier(folder)], ttl_seconds=100) as store:
        DiskTier(folder).pin(KEYS[0])
        assert store.get(KEYS[0]).tier == "disk"
        clock.advance(200)
        assert store.get(KEYS[0]).tier == "host"
        assert store.evict_expired() == 1
        assert held(folder) == {0}


def test_pins_of_two_processes_add_up(folder):
    one, other = DiskTier(folder), DiskTier(folder)
    one.pin(KEYS[0], KEYS[1])
    other.pin(KEYS[2])
    other.unpin(KEYS[1], KEYS[4])
    assert one.pinned() == other.pinned() == {KEYS[0], KEYS[2]}
    assert one.is_pinned(KEYS[2])
    assert not one.is_pinned(KEYS[1])


def test_a_folder_that_is_only_read_is_pinned_for_this_process_alone(folder):
    reader = DiskTier(folder, policy=TierPolicy(read_only=True))
    reader.pin(KEYS[0])
    assert reader.is_pinned(KEYS[0])
    assert not (folder / "pins").exists()
    DiskTier(folder).pin(KEYS[1])
    assert reader.pinned() == {KEYS[0], KEYS[1]}


def test_what_is_no_key_is_passed_over(folder):
    lines = ["../../etc/passwd", str(KEYS[0]), "", str(KEYS[1]).upper(), "\x00" * 40, str(KEYS[2])]
    (folder / "pins").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    assert DiskTier(folder).pinned() == {KEYS[0], KEYS[2]}


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "large"])
def test_what_is_no_small_file_pins_nothing_and_is_not_waited_for(folder, kind, tmp_path_factory):
    path, aside = folder / "pins", tmp_path_factory.mktemp("aside") / "keys"
    aside.write_text(f"{KEYS[0]}\n")
    if kind == "link":
        path.symlink_to(aside)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(f"{KEYS[0]}\n".encode() + b"x" * pins.MOST_BYTES)
    tier = DiskTier(folder)
    assert tier.pinned() == set()
    if kind == "folder":
        with pytest.raises(StoreError, match="cannot pin in"):
            tier.pin(KEYS[1])
    else:
        tier.pin(KEYS[1])
        assert tier.pinned() == {KEYS[1]}
    assert aside.read_text() == f"{KEYS[0]}\n", "nothing is written through a link"


def test_pins_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(pins, "MOST_PINS", 2)
    tier = DiskTier(tmp_path)
    tier.pin(*KEYS[:2])
    with pytest.raises(StoreError, match=r"^3 chunks are more than the 2 that can be pinned$"):
        tier.pin(KEYS[2])
    (tmp_path / "pins").write_text("".join(f"{key}\n" for key in KEYS))
    assert len(PinFile(tmp_path / "pins").keys()) == 2


def test_a_file_that_cannot_be_read_unpins_nothing(folder, monkeypatch, caplog):
    DiskTier(folder).pin(KEYS[0])
    tier, fresh = DiskTier(folder), DiskTier(folder)
    assert tier.is_pinned(KEYS[0])
    other = DiskTier(folder)
    other.pin(KEYS[1])  # the file has changed when it cannot be read

    def fails(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(pins, "read_regular", fails)
        for _ in range(2):
            assert tier.pinned() == {KEYS[0]}
        assert caplog.text.count("cannot be read, pins stay as they were") == 1
        with pytest.raises(StoreError, match=r"cannot pin in .*Too many open files"):
            fresh.pin(KEYS[2])
    assert tier.pinned() == {KEYS[0], KEYS[1]}, "nothing was lost, and the file is read again"
    fresh.pin(KEYS[2])
    assert other.pinned() == set(KEYS[:3])
