"""Small weights stepped together, as Triton's interpreter does it."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which is for Linux")

from helpers.step_cases import compare_steps, odd_steps

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs it for real")


def test_steps_of_many_weights_are_sgds() -> None:
    torchs, ours, odd = compare_steps("cpu", torch.float16)
    assert not odd
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(torchs, ours, strict=True))


def test_weights_that_are_others_than_before_have_a_table_of_their_own() -> None:
    from deat.engine.kernels.sgd_triton import FusedSGD
    from deat.training.optimizers import sgd_step

    step, lr, momentum = FusedSGD(sgd_step), torch.tensor(1.0), torch.tensor(0.0)
    held, tables = {size: (torch.zeros(size), torch.zeros(size)) for size in (3, 5)}, []
    for size in (3, 5, 3):
        w, v = held[size]
        step([w], [v], [torch.ones(size)], lr, momentum, 0.0, [None])
        tables.append(list(step._small_weight_sgd._tables.values()))
    assert held[3][0].tolist() == [-2.0] * 3
    assert held[5][0].tolist() == [-1.0] * 5
    assert [len(made) for made in tables] == [1, 2, 2]
    assert tables[0][0] is tables[-1][0], "a recording may have its address"


def test_a_gradient_in_another_order_of_memory_steps_its_weight_all_the_same() -> None:
    assert odd_steps("cpu")
