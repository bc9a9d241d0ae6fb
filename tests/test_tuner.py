"""The tuner's choice among candidates, with timers that only pretend to run something."""

import math
import random
import time

import pytest

from jax_swiglu import _ffi


class FakeTimer:
    """Answers with given seconds for each candidate; runs nothing, and takes no time itself."""

    def __init__(self, cold, loaded=None):
        self.cold = cold
        self.loaded = cold if loaded is None else loaded
        self.repeats = [[] for _ in cold]

    def __call__(self, candidate, repeats):
        self.repeats[candidate].append(repeats)
        seconds = self.cold[candidate]
        if seconds is None:
            raise ValueError("this plan does not run")
        # A measurement of more than half of 0.05 s counts as continuous load.
        return self.loaded[candidate] if seconds * repeats > 0.025 else seconds


def pick(timer, budget=2.0):
    return _ffi.pick_fastest(len(timer.cold), timer, budget, time.perf_counter)


@pytest.mark.parametrize("best", range(4))
def test_the_fastest_wins_wherever_it_stands(best):
    timer = FakeTimer([1e-5 if i == best else 3e-5 for i in range(4)])
    assert pick(timer) == (best, pytest.approx(1e-5))


def test_a_single_slow_run_drops_nobody():
    class Hesitant(FakeTimer):
        """The fastest one seems slow until it has run a few times, as on a GPU that was idle."""

        def __call__(self, candidate, repeats):
            seconds = super().__call__(candidate, repeats)
            return 2.2 * seconds if candidate == 0 and len(self.repeats[0]) < 4 else seconds

    assert pick(Hesitant([5.5e-5, 6.2e-5, 6.5e-5]))[0] == 0


def test_of_equals_the_first():
    assert pick(FakeTimer([1.000e-5, 0.997e-5, 1.02e-5]))[0] == 0
    assert pick(FakeTimer([1.02e-5, 0.997e-5, 1.000e-5]))[0] == 1


def test_slow_candidates_are_dropped_after_one_run():
    timer = FakeTimer([1e-4, 11e-4, 1.05e-4])
    assert pick(timer)[0] == 0
    assert timer.repeats[1] == [1, 1]
    assert max(timer.repeats[0]) > 1


def test_long_kernels_must_keep_up_under_load():
    timer = FakeTimer(cold=[1.00e-3, 1.05e-3], loaded=[1.20e-3, 1.10e-3])
    assert pick(timer) == (1, pytest.approx(1.05e-3))


class Clocked(FakeTimer):
    """Each load takes as long on the clock as it says, scaled by clocks that wander."""

    def __init__(self, cold, loaded):
        super().__init__(cold, loaded)
        self.now = 0.0
        self.random = random.Random(0)

    def __call__(self, candidate, repeats):
        seconds = super().__call__(candidate, repeats) * (1.1 + 0.1 * math.sin(self.now))
        seconds *= self.random.gauss(1, 0.005)
        self.now += seconds * repeats
        return seconds


@pytest.mark.parametrize("first", [1.11e-3, 1.13e-3])
def test_small_differences_under_load_count_with_time_enough(first):
    timer = Clocked(cold=[1.00e-3, 1.02e-3], loaded=[first, 1.10e-3])
    choice = _ffi.pick_fastest(2, timer, 4.0, lambda: timer.now)
    assert choice[0] == 1


def test_small_differences_under_load_are_chance_in_a_hurry():
    timer = Clocked(cold=[1.00e-3, 1.02e-3], loaded=[1.11e-3, 1.10e-3])
    assert _ffi.pick_fastest(2, timer, 0.3, lambda: timer.now)[0] == 0


def test_short_kernels_are_not():
    timer = FakeTimer(cold=[1.00e-5, 1.05e-5], loaded=[1.20e-5, 1.10e-5])
    assert pick(timer)[0] == 0
    assert max(timer.repeats[0]) <= 1000


def test_failing_candidates_are_skipped():
    assert pick(FakeTimer([None, 2e-5, None, 1e-5]))[0] == 3


@pytest.mark.parametrize("cold", [[], [None, None]])
def test_nothing_works(cold):
    assert pick(FakeTimer(cold)) == (-1, 0)


def test_budget():
    class Slow(FakeTimer):
        def __call__(self, candidate, repeats):
            time.sleep(0.05)
            return super().__call__(candidate, repeats)

    timer = Slow([1e-3] * 20)
    start = time.perf_counter()
    assert pick(timer, budget=0.4)[0] >= 0
    # Half of it for the first look, which met some of them but not all.
    seen = sum(bool(repeats) for repeats in timer.repeats)
    assert 0 < seen < 20
    # Rounds that were begun are finished: six candidates three times, four of them twice more.
    assert time.perf_counter() - start < 0.4 + 0.05 * (6 * 3 + 4 * 4) + 0.5
