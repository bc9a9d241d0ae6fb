"""The choice of plans and route for an op within a time budget, on a clock that only pretends."""

import pytest

from jax_swiglu import _ffi

# As glu_fwd: a fused graph, or a GEMM and a fused graph, or a GEMM and a pointwise graph.
DUAL, GEMM, EPILOGUE, POINTWISE = range(4)
ROUTES = [[DUAL], [GEMM, EPILOGUE], [GEMM, GEMM, POINTWISE]]
RELIABLE = 2


class FakeOp:
    """Plans with given seconds of one run, None where one does not run, 0 where it is not built."""

    def __init__(self, plans, build_seconds=0.0, overhead=0.0, routes=ROUTES):
        self.plans = plans
        self.routes = routes
        self.build_seconds = build_seconds
        self.overhead = overhead
        self.now = 0.0
        self.built = []
        self.timed = set()
        self.timed_routes = set()

    def build(self, order, seconds):
        end = self.now + seconds
        results = []
        for graph, plan in order:
            if self.now >= end:
                results.append(False)
                continue
            self.now += self.build_seconds
            self.built.append((graph, plan))
            results.append(self.plans[graph][plan] != 0)
        return results

    def run(self, seconds, repeats):
        if seconds is None:
            raise ValueError("this plan does not run")
        self.now += seconds * repeats + self.overhead
        return seconds

    def time_plan(self, plan, repeats):
        self.timed.add(plan)
        return self.run(self.plans[plan[0]][plan[1]], repeats)

    def time_route(self, route, plans, repeats):
        self.timed_routes.add(route)
        seconds = [self.plans[graph][plans[graph]] for graph in self.routes[route]]
        return self.run(None if None in seconds else sum(seconds), repeats)

    def tune(self, budget=2.0):
        return _ffi.tune_op(
            [len(plans) for plans in self.plans],
            self.routes,
            self.build,
            self.time_plan,
            self.time_route,
            budget,
            lambda: self.now,
        )


def test_the_fastest_plans_and_route():
    op = FakeOp([[9e-5, 3e-5], [2e-5, 1e-5], [8e-5, 7e-5], [1e-5, 2e-5]])
    assert op.tune() == (0, [1, 1, 1, 0], pytest.approx(3e-5))
    op = FakeOp([[9e-5, 5e-5], [2e-5, 1e-5], [8e-5, 7e-5], [1e-5, 2e-5]])
    assert op.tune() == (RELIABLE, [1, 1, 1, 0], pytest.approx(3e-5))


def test_of_equal_routes_the_one_with_fewer_kernels():
    op = FakeOp([[3e-5], [1e-5], [2e-5], [1e-5]])
    assert op.tune() == (0, [0, 0, 0, 0], pytest.approx(3e-5))
    op = FakeOp([[4e-5], [1e-5], [2e-5], [1e-5]])
    assert op.tune() == (1, [0, 0, 0, 0], pytest.approx(3e-5))


def test_plans_that_fail_are_left_out():
    op = FakeOp([[0, None, 3e-5], [0, 1e-5], [None, None], [2e-5, None]])
    assert op.tune() == (0, [2, 1, -1, 0], pytest.approx(3e-5))


def test_a_route_without_a_plan_is_left_out():
    op = FakeOp([[], [1e-4], [0, 0], [1e-5]])
    assert op.tune() == (RELIABLE, [-1, 0, -1, 0], pytest.approx(2.1e-4))


@pytest.mark.parametrize("plans", [[[]] * 4, [[0, 0]] * 4, [[None]] * 4, [[None, None]] * 4])
def test_nothing_works(plans):
    route, _, seconds = FakeOp(plans).tune()
    assert (route, seconds) == (-1, 0)


def test_a_known_plan_is_not_timed_again():
    op = FakeOp([[5e-5, 3e-5], [2e-5], [7e-5], [1e-5]])
    assert op.tune() == (0, [1, 0, 0, 0], pytest.approx(3e-5))
    assert op.timed == {(DUAL, 0), (DUAL, 1)}


def test_one_graph_is_timed_only_once():
    op = FakeOp([[2e-5, None, 1e-5]], routes=[[0]])
    assert op.tune() == (0, [2], pytest.approx(1e-5))
    assert op.timed_routes == set()


def test_first_proposals_are_built_first():
    op = FakeOp([[1e-5] * 3, [1e-5] * 2, [1e-5], [1e-5]])
    op.tune()
    assert op.built[:4] == [(GEMM, 0), (POINTWISE, 0), (EPILOGUE, 0), (DUAL, 0)]
    assert op.built[4:] == [(GEMM, 1), (DUAL, 1), (DUAL, 2)]


@pytest.mark.parametrize("seconds", [1e-5, 1e-3, 2e-2])
@pytest.mark.parametrize("build_seconds", [0.0, 0.01, 0.4])
@pytest.mark.parametrize("budget", [0.7, 2.8, 10.0])
def test_the_budget_is_kept(seconds, build_seconds, budget):
    op = FakeOp([[seconds * (1 + 0.01 * i) for i in range(20)]] * 4, build_seconds, 1e-3)
    assert op.tune(budget)[0] >= 0
    # What is begun is finished: a build, and for each of four graphs and the routes a short look.
    # The reliable route is built even where that alone takes longer.
    look = 2 * seconds + 3 * 6 * max(0.012, 3 * seconds)
    assert op.now <= max(budget, 2 * build_seconds) + build_seconds + 5 * look


def test_the_reliable_route_where_the_time_is_over():
    """Whatever the time: the first proposal for a fused graph may be eleven times slower."""
    op = FakeOp([[5e-3, 1e-3], [1e-3], [5e-3, 1e-3], [1e-4]], build_seconds=5.0)
    assert op.tune(0.7)[:2] == (RELIABLE, [-1, 0, -1, 0])
    assert op.now < 2 * 5.0 + 0.7
