"""The text: where it comes from, how it is split, what it costs a model without context."""

import contextlib
import math
import os
import random
import sysconfig
from pathlib import Path

import pytest
import torch
from helpers.compare import assert_equal, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from axonmpi.train import Corpus, TextConfig, load_corpus
from axonmpi.train.corpus import split_blocks


def test_default_text_is_the_library_in_the_order_of_its_paths():
    folder = Path(sysconfig.get_paths()["stdlib"])
    others = {"__pycache__", "dist-packages", "idlelib", "site-packages", "test", "tests"}
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    text = b"".join((folder / path).read_bytes() for path in paths if not others.intersection(path.parts))
    corpus, again = (load_corpus(TextConfig(data_limit=1, held_out_fraction=0.1), 128) for _ in range(2))
    expected = split_blocks(torch.frombuffer(bytearray(text[:1_000_000]), dtype=torch.uint8), 0.1, 129)
    assert_equal([corpus.train, corpus.held_out, again.digest], [*expected, corpus.digest])


def test_a_folder_is_read_in_sorted_order_up_to_the_limit(tmp_path):
    for name in ("b", "c", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_bytes(name.encode() * 400)
    for limit, counts in ((1.0, [400, 400, 400]), (0.0009, [400, 400, 100])):
        corpus = load_corpus(TextConfig(data=tmp_path, data_limit=limit, held_out_fraction=0.5), 99)
        both = bytes(torch.cat((corpus.train, corpus.held_out)).numpy())
        assert [both.count(name) for name in (b"a", b"b", b"c")] == counts
        assert (corpus.train[0], corpus.held_out[-1]) == (ord("a"), ord("c"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", r"--data .*nowhere.*No such file"),
        ("none", r"--data .*expected text, found none"),
        ("empty", r"--data .*expected text, found none"),
        ("small", r"at least 18 bytes.*got 17.*smaller sequence_length"),
        ("pipe", r"--data .*expected a file or a folder"),
        pytest.param(
            *("/proc/self/mem", r"--data .*cannot read /proc/self/mem"),  # permissions do not stop root, this does
            marks=pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="not on macOS"),
        ),
    ],
)
def test_texts_that_cannot_be_used_are_refused(tmp_path, name, message):
    (tmp_path / "none").mkdir()
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "small").write_bytes(b"a" * 17)
    (tmp_path / "enough").write_bytes(b"a" * 18)
    refused(ValueError, (lambda: load_corpus(TextConfig(data=tmp_path / name), 8), message))
    assert len(load_corpus(TextConfig(data=tmp_path / "enough"), 8).held_out) == 9


@contextlib.contextmanager
def ordinary_user():
    """Be one in the block, as root may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_folder_with_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # the other user may be in a folder that it cannot reach from the root
    Path("a").write_bytes(b"a" * 400)
    Path("b").mkdir(mode=0)
    with ordinary_user():
        with pytest.raises(ValueError, match=r"--data \.: cannot read .*b: Permission denied"):
            load_corpus(TextConfig(data="."), 8)
        assert load_corpus(TextConfig(data=".", data_limit=0.0003), 8)  # which does not need it


@settings(max_examples=25)
@given(st.integers(20, 400) | st.sampled_from([10_007, 300_000]), st.floats(0.001, 0.5), st.integers(1, 10))
def test_blocks_are_whole_disjoint_and_complete(length, fraction, shortest):
    text = torch.arange(length)
    train, held_out = split_blocks(text, fraction, shortest)
    assert torch.equal(torch.cat((train, held_out)).sort().values, text)
    for part in (train, held_out):
        cuts = (part.diff() != 1).nonzero().flatten() + 1
        assert min(map(len, torch.tensor_split(part, cuts))) >= shortest


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("length", [10_000, 1_000_000])
def test_held_out_part_is_about_as_large_as_asked(fraction, length):
    _, held_out = split_blocks(torch.zeros(length, dtype=torch.uint8), fraction, 10)
    assert len(held_out) / length == pytest.approx(fraction, rel=0.15)


def test_unigram_entropy_is_the_cross_entropy_of_counts_with_one_added():
    draw = random.Random(5)
    train = [draw.choice(b"aab") for _ in range(1000)]
    held_out = [draw.choice(b"abc") for _ in range(300)]
    chances = [(train.count(byte) + 1) / (1000 + 256) for byte in range(256)]
    expected = -sum(math.log(chances[byte]) for byte in held_out) / 300
    as_tensors = (torch.tensor(part, dtype=torch.uint8) for part in (train, held_out))
    assert Corpus("", *as_tensors, "").unigram_entropy == pytest.approx(expected, rel=1e-12)
    text = torch.arange(256, dtype=torch.uint8).repeat(4)
    assert Corpus("", text, text, "").unigram_entropy == pytest.approx(math.log(256))
