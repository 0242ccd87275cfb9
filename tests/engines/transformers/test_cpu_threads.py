"""How many threads short operations get, by what other processes use."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from cacheblend_rag import BlendConfig, Document, SamplingParams, TransformersEngine
from cacheblend_rag.engines.machine import CpuCounters, Machine
from cacheblend_rag.engines.transformers import model_steps
from cacheblend_rag.engines.transformers.cpu_threads import WINDOW_SECONDS, CpuThreads
from tests.models import make_model, make_tokenizer, prompt_of, words

CPUS = 4
LONG = SamplingParams.greedy(max_tokens=3, ignore_eos=True)


class Scripted(Machine):
    """A machine of four CPUs; others use so many of them, and this process one."""

    def __init__(self) -> None:
        self.others, self.now, self.readings = 0.0, 0.0, 0
        self._busy = self._own = 0.0

    def clock(self) -> float:
        return self.now

    def run(self, seconds: float, *, others: float | None = None) -> None:
        self.others = self.others if others is None else others
        self.now += seconds
        self._own += seconds
        self._busy += seconds * (1 + self.others)

    def counters(self) -> CpuCounters | None:
        self.readings += 1
        idle = CPUS * self.now - self._busy
        return CpuCounters(CPUS, self._busy, idle, steal=0.0, own=self._own)


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(CPUS)
    yield
    torch.set_num_threads(before)


def limited(threads: CpuThreads) -> int:
    with threads.limited():
        return torch.get_num_threads()


@pytest.fixture
def machine() -> Scripted:
    return Scripted()


@pytest.fixture
def threads(machine: Scripted) -> CpuThreads:
    found = CpuThreads(machine, machine.clock)
    assert limited(found) == CPUS, "nothing is known yet"
    return found


@pytest.mark.parametrize(
    ("others", "count"), [(0.0, 4), (0.3, 4), (0.75, 3), (1.0, 3), (2.5, 1), (3.0, 1), (3.9, 1)]
)
def test_a_thread_for_each_cpu_that_others_leave(
    machine: Scripted, threads: CpuThreads, others: float, count: int
) -> None:
    machine.run(1.0, others=others)
    assert limited(threads) == count
    assert torch.get_num_threads() == CPUS


def test_it_follows_the_load_but_reads_it_only_now_and_then(
    machine: Scripted, threads: CpuThreads
) -> None:
    machine.run(1.0, others=2.0)
    assert limited(threads) == 2
    before, machine.others = machine.readings, 0.0
    machine.run(WINDOW_SECONDS / 2)
    assert (limited(threads), machine.readings) == (2, before)
    machine.run(WINDOW_SECONDS)
    assert (limited(threads), machine.readings) == (4, before + 1)


def test_never_more_threads_than_pytorch_was_given(machine: Scripted, threads: CpuThreads) -> None:
    torch.set_num_threads(2)
    machine.run(1.0, others=1.0)
    assert limited(threads) == 2
    assert torch.get_num_threads() == 2


def test_an_error_leaves_the_usual_threads(machine: Scripted, threads: CpuThreads) -> None:
    machine.run(1.0, others=2.0)
    with pytest.raises(RuntimeError), threads.limited():
        raise RuntimeError
    assert torch.get_num_threads() == CPUS


def test_a_thread_that_began_under_a_limit_gets_the_usual_threads(
    machine: Scripted, threads: CpuThreads
) -> None:
    """PyTorch passes a limit on to threads whose first operation runs meanwhile."""
    machine.run(1.0, others=2.0)
    found: list[int] = []
    has_begun, may_go_on = threading.Event(), threading.Event()

    def other() -> None:
        found.append(torch.get_num_threads())
        has_begun.set()
        may_go_on.wait(10)
        found.append(threads.usual())
        found.append(torch.get_num_threads())

    one = threading.Thread(target=other)
    with threads.limited():
        one.start()
        assert has_begun.wait(10)
    may_go_on.set()
    one.join(10)
    assert found == [2, 4, 4]


def test_what_the_user_sets_holds_even_if_it_was_a_limit_before(
    machine: Scripted, threads: CpuThreads
) -> None:
    machine.run(1.0, others=2.0)
    assert limited(threads) == 2
    torch.set_num_threads(2)
    machine.run(1.0, others=0.0)
    assert limited(threads) == 2
    assert torch.get_num_threads() == 2


def test_threads_that_are_bound_to_single_cpus_are_not_limited() -> None:
    """Their system tells of one CPU only, that of the thread that asks."""

    class Bound(Machine):
        read = 0.0

        def counters(self) -> CpuCounters | None:
            self.read += 1.0
            return CpuCounters(1, busy=self.read, idle=0.0, steal=0.0, own=CPUS * self.read)

    times = iter(range(10))
    threads = CpuThreads(Bound(), lambda: float(next(times)))
    assert [limited(threads), limited(threads)] == [CPUS, CPUS]


def test_where_the_number_of_threads_is_fixed_it_is_set_once(
    machine: Scripted, threads: CpuThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the process of vLLM's CPU worker."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    machine.run(1.0, others=2.0)
    assert [limited(threads), limited(threads)] == [CPUS, CPUS]
    assert asked == [2]


def test_systems_that_do_not_tell_their_load_cost_no_thread() -> None:
    class Silent(Machine):
        def counters(self) -> CpuCounters | None:
            return None

    times = iter(range(10))
    threads = CpuThreads(Silent(), lambda: float(next(times)))
    assert [limited(threads), limited(threads)] == [CPUS, CPUS]


def test_blends_and_decode_steps_are_limited_and_ordinary_prefill_is_not(
    machine: Scripted, threads: CpuThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_steps, "cpu_threads", threads)
    model = make_model()
    engine = TransformersEngine(
        model, tokenizer=make_tokenizer(), config=BlendConfig(min_tokens=0, cost_model=False)
    )
    machine.run(1.0, others=2.0)
    counts = list[tuple[int, int]]()
    layer = model.model.layers[-1].mlp
    layer.register_forward_hook(
        lambda _, given, __: counts.append((given[0].shape[1], torch.get_num_threads()))
    )
    document = Document("a", (words(60, 1),))
    prompt = prompt_of(*document.to_chunks(), " ", words(9, 2))
    engine.precompute([document], progress=False)
    counts.clear()
    told = engine.generate(prompt, LONG)
    assert told.report.blended
    assert [threads for _, threads in counts] == [2] * len(counts)
    assert len(counts) == 3, "a prefill and two tokens"
    counts.clear()
    engine.generate_full(prompt, LONG)
    assert counts[0][1] == CPUS
    assert counts[-1] == (1, 2)
