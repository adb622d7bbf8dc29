"""Laws of the simulated sweep: nothing is held twice, and nothing that could run waits."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckfold import InputError
from asynckfold.jobs.placement import FULL_SHARE, NodeSize, Request
from asynckfold.planning.forecast import simulate
from tests.size import examples

Sweep = tuple[list[Request], list[NodeSize]]


@st.composite
def sweeps(draw: st.DrawFn) -> Sweep:
    gpus = draw(st.integers(0, 2))
    nodes = draw(st.lists(st.builds(NodeSize, st.integers(3, 5), st.just(gpus)), min_size=1))[:4]
    requests = draw(
        st.lists(
            st.builds(
                Request,
                job_id=st.text("abc", min_size=1, max_size=3),
                seconds=st.integers(0, 9).map(float),
                threads=st.integers(1, 3),
                gpu=st.booleans() if gpus else st.just(False),
                gpu_share=st.sampled_from([0.2, 0.3, 0.45, 0.9]),
            ),
            max_size=14,
            unique_by=lambda request: request.job_id,
        )
    )
    return requests, nodes


@settings(max_examples=examples(300))
@given(sweeps())
def test_the_nodes_could_carry_it_out(sweep: Sweep) -> None:
    requests, nodes = sweep
    simulation = simulate(requests, nodes)
    by_id = {item.job_id: item for item in requests}
    sizes = dict(zip(simulation.names, nodes, strict=True))
    assert sorted(span.job for span in simulation.spans) == sorted(by_id)
    assert all(span.end - span.start == by_id[span.job].seconds for span in simulation.spans)
    for start, name in itertools.product({span.start for span in simulation.spans}, sizes):
        active = [s for s in simulation.spans if s.node == name and s.start <= start < s.end]
        cores = [core for span in active for core in span.cores]
        assert len(set(cores)) == len(cores)
        assert set(cores) <= set(range(sizes[name].cores))
        for gpu in {span.gpu for span in active} - {None}:
            shares = [by_id[span.job].gpu_share for span in active if span.gpu == gpu]
            assert math.fsum(shares[:-1]) < FULL_SHARE
    assert simulation.makespan >= simulation.lower_bound - 1e-9


def test_the_bound_counts_a_shared_gpu_by_its_shares() -> None:
    jobs = [Request(name, 4.0, gpu=True, gpu_share=0.45) for name in "abcd"]
    assert simulate(jobs, [NodeSize(4, 1)]).lower_bound == 8.0
    alone = [replace(item, gpu_share=0.9) for item in jobs]
    assert simulate(alone, [NodeSize(4, 1), NodeSize(4, 1)]).lower_bound == 8.0


def test_a_gpu_job_without_a_gpu_is_refused() -> None:
    with pytest.raises(InputError, match="'a', and no GPU"):
        simulate([Request("a", 1.0, gpu=True)], [NodeSize(2)])
