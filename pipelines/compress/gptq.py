"""GPTQ of one decoder layer: round its weights column by column, and let the columns that follow compensate.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022), in the form
of Babai's nearest plane (Chen et al., "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm",
2025). With the Hessian H = L L^T, the error of a weight w that is rounded to q is |(w - q) L|^2, and element k of that
vector depends on columns k and later alone. So columns are rounded from the last to the first, each to what makes its
element smallest. This takes one Cholesky factor, where the paper of 2022 inverts the Hessian between two of them.

Columns are rounded in the order of their inputs' second moments, the largest first (`actorder="static"` of
llm-compressor), because most columns are left then to compensate the errors that cost most. Groups are of neighbouring
columns as ever, with scales from before, so the checkpoint needs no order of its own.

Shapes: n tokens, o output and i input channels, r the same in order of their moments, the least first, g groups of
input channels; a tensor's name ends with its shape.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from pipelines.compress.moments import Moments

DAMP = 0.01
"""Share of the Hessian's mean diagonal that is added to it, as in the paper and in ModelOpt."""
_FEW = 128
"""Columns whose products are too small for several threads."""


def round_linears(
    linears: Mapping[str, torch.nn.Module],
    hessians: list[Moments],
    scales: Callable[[torch.nn.Module], torch.Tensor],
) -> list[str]:
    """Replace the weights of linears by rounded ones.

    Args:
        linears: by name.
        hessians: from `observed`; emptied, because one of them can be larger than the layer.
        scales: returns the scale of each group of a linear's weights, float32 [G, O].

    Returns:
        the linears whose Hessian is not positive definite, which are rounded to nearest.
    """
    to_nearest: list[str] = []
    while hessians:
        names, hessian_rr = hessians[-1].linears, hessians.pop().take()
        order_r = put_in_order(hessian_rr)
        groups: dict[bytes, list[str]] = {}  # by the columns whose weights are all zero: mostly one group
        for name in names:
            unused_i = linears[name].get_parameter("weight").eq(0).all(dim=0)
            groups.setdefault(unused_i.cpu().numpy().tobytes(), []).append(name)
        while groups:
            _, alike = groups.popitem()
            weights = [linears[name].get_parameter("weight") for name in alike]
            unused_i = weights[0].eq(0).all(dim=0)
            factor_rr = error_factor(hessian_rr.clone() if groups else hessian_rr, unused_i[order_r])
            if factor_rr is None:
                factor_rr = torch.eye(len(unused_i), device=unused_i.device)
                to_nearest += alike
            scales_go = torch.cat([scales(linears[name]) for name in alike], dim=1)
            rounded_oi = rounded(torch.cat([weight.data for weight in weights]), factor_rr, scales_go, order_r)
            for weight, part_oi in zip(weights, torch.split(rounded_oi, list(map(len, weights))), strict=True):
                weight.data = part_oi.contiguous()
    return to_nearest


def put_in_order(hessian_rr: torch.Tensor) -> torch.Tensor:
    """Sort a Hessian [I, I] by its diagonal in its memory; return which column each was, int64 [I].

    Args:
        hessian_rr: its lower triangle is read; contiguous.
    """
    order_r = hessian_rr.diagonal().argsort(stable=True)
    _mirror(hessian_rr)
    for dim in (0, 1):
        for some_rr in torch.split(hessian_rr, _FEW, 1 - dim):
            some_rr.copy_(some_rr.index_select(dim, order_r))
    return order_r


def error_factor(hessian_rr: torch.Tensor, unused_r: torch.Tensor) -> torch.Tensor | None:
    """Return the lower Cholesky factor of the damped Hessian, with columns divided by their diagonal elements.

    Args:
        hessian_rr: symmetric and contiguous; overwritten.
        unused_r: columns whose weights are all zero, which must not influence others.

    Returns:
        the factor, in the Hessian's memory; None if the Hessian is not positive definite.
    """
    hessian_rr[unused_r, :] = 0
    hessian_rr[:, unused_r] = 0
    diagonal = hessian_rr.diagonal()
    diagonal[unused_r] = 1
    diagonal += DAMP * torch.mean(diagonal.clone())
    failed = torch.empty((), dtype=torch.int32, device=hessian_rr.device)
    # LAPACK's matrices lie transposed in memory; PyTorch would take a second one for that
    torch.linalg.cholesky_ex(hessian_rr.t(), out=(hessian_rr.t(), failed))
    _mirror(hessian_rr.t())
    return None if failed else hessian_rr.div_(hessian_rr.diagonal().clone())


def _mirror(matrix_rr: torch.Tensor) -> None:
    """Copy the lower triangle to the upper one."""
    for start in range(0, len(matrix_rr), _FEW):
        rows_rr = matrix_rr[start : start + _FEW]
        square_rr = rows_rr[:, start : start + _FEW]
        square_rr.tril_().add_(square_rr.tril(-1).t())
        matrix_rr[:start, start : start + _FEW] = rows_rr[:, :start].t()


def rounded(
    weight_oi: torch.Tensor, factor_rr: torch.Tensor, scales_go: torch.Tensor, order_r: torch.Tensor
) -> torch.Tensor:
    """Return the rounded weights, in the same type.

    Args:
        weight_oi: weights of linears with the same input; where half of them are zero, these stay zero (2:4 sparsity).
        factor_rr: from `error_factor`.
        scales_go: of groups of I / G neighbouring columns; a weight is a whole number of them, from -8 to 7.
        order_r: columns in the order of the factor; the last is rounded first.
    """
    rounded_ro, groups_r = weight_oi.t()[order_r], (order_r // (len(order_r) // len(scales_go))).tolist()
    # rows that are not rounded yet hold what they are rounded from, the others their errors
    work_ro = rounded_ro.to(torch.float32, copy=True)
    values_o = torch.empty_like(work_ro[0])
    sparse = 2 * int(torch.count_nonzero(rounded_ro)) <= rounded_ro.numel()

    def round_column(k: int, _: int) -> None:
        scale_o = scales_go[groups_r[k]]
        torch.div(work_ro[k], scale_o, out=values_o).round_().clamp_(-8, 7).mul_(scale_o)
        if sparse:
            values_o.masked_fill_(rounded_ro[k] == 0, 0)
        torch.sub(rounded_ro[k], values_o, out=work_ro[k])
        rounded_ro[k] = values_o

    def round_few(start: int, stop: int) -> None:
        with _one_thread():
            _solve(work_ro, factor_rr, range(start, stop), 1, round_column)

    _solve(work_ro, factor_rr, range(len(work_ro)), _FEW, round_few)
    return torch.empty_like(rounded_ro).index_copy_(0, order_r, rounded_ro).t()


def _solve(
    work_ro: torch.Tensor,
    factor_rr: torch.Tensor,
    columns: range,
    at_once: int,
    solve_part: Callable[[int, int], None],
) -> None:
    """Solve for columns from the last to the first, in parts of at most `at_once`.

    It is no function within `rounded`: one that calls itself would keep the tensors until the garbage collector runs.
    """
    start, stop = columns.start, columns.stop
    if stop - start <= at_once:
        solve_part(start, stop)
        return
    middle = (start + stop) // 2
    _solve(work_ro, factor_rr, range(middle, stop), at_once, solve_part)
    work_ro[start:middle].addmm_(factor_rr[middle:stop, start:middle].t(), work_ro[middle:stop])
    _solve(work_ro, factor_rr, range(start, middle), at_once, solve_part)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
