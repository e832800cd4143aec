"""The disk cache: one rename publishes, a checksum guards."""

from pathlib import Path

import pytest

from hexa_fx.jit.cache import BuiltKernel, KernelCache, cache_key


def store(cache: KernelCache, key: str, cubin: bytes = b"cubin") -> BuiltKernel:
    with cache.lock(key):
        folder = cache.workspace(key)
        (folder / "kernel.cubin").write_bytes(cubin)
        (folder / "kernel.cu").write_text("text")
        return cache.publish(key, folder, {"compiler": "x"})


def test_what_was_stored_is_found(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    assert cache.get("k") is None
    store(cache, "k")
    found = cache.get("k")
    assert found is not None
    assert (found.cubin, found.source.read_text()) == (b"cubin", "text")
    assert cache.keys() == ["k"]
    assert not list((tmp_path / "building").iterdir())


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("kernel.cubin", b"cubiM"),
        ("kernel.cubin", b""),
        ("meta.json", b"{"),
        ("meta.json", b"[]"),
        ("meta.json", b"{}"),
    ],
)
def test_a_damaged_entry_is_a_miss_and_is_replaced(tmp_path: Path, file: str, content: bytes) -> None:
    cache = KernelCache(tmp_path)
    entry = store(cache, "k")
    (entry.path / file).write_bytes(content)
    assert cache.get("k") is None
    store(cache, "k", b"again")
    found = cache.get("k")
    assert found is not None
    assert found.cubin == b"again"


@pytest.mark.parametrize("file", ["kernel.cubin", "meta.json"])
def test_a_missing_file_is_a_miss(tmp_path: Path, file: str) -> None:
    cache = KernelCache(tmp_path)
    (store(cache, "k").path / file).unlink()
    assert cache.get("k") is None


def test_what_a_killed_build_left_is_swept_by_the_next_one_of_the_same_key(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    left, other = cache.workspace("k"), cache.workspace("j")
    (left / "kernel.cubin").write_bytes(b"half")
    assert cache.get("k") is None
    fresh = cache.workspace("k")
    assert not left.exists()
    assert other.exists()
    assert not list(fresh.iterdir())


def test_clear_counts_entries_and_leaves_nothing(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    assert cache.clear() == 0
    store(cache, "a"), store(cache, "b"), cache.workspace("c")
    assert cache.clear() == 2
    assert cache.keys() == []
    assert cache.get("a") is None


def test_key_parts_do_not_run_into_each_other() -> None:
    assert cache_key("ab", "c") != cache_key("a", "bc")
