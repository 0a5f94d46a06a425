"""MaxK-GNN (ASPLOS 2024), rerun."""
from .. import _harness, maxk, spmm
from ._exhibit import Maker, Paper, Run, fastest, ratio

KS = (8, 16, 32, 64, 96, 128, 192)
QUICK_KS = (8, 32)
WIDTH = 256


def figure8(run: Run) -> None:
    exhibit = run.exhibit(
        'Figure 8: kernels over k', width='k',
        shows='TO BE WRITTEN', differs='TO BE WRITTEN')
    graph = run.like('Reddit')
    case = maxk.Case(graph, _harness.DTYPES['float32'], WIDTH)
    cells = maxk.measure_over_k(
        {k: maxk.forwards(case, k) for k in (QUICK_KS if run.quick else KS)},
        maxk.all_columns(case, maxk.FORWARD), run.kernel)
    for k, results in cells.items():
        ours = fastest(results, maxk.OURS)
        rivals = fastest(results, *maxk.CUSPARSE['cuSPARSE'], *maxk.CUSPARSE['cuSPARSE preprocessed'],
                         spmm.TORCH)
        exhibit.line(graph.name, k, results=results, here={
            'forward, ms': ours, 'speed-up': ratio(rivals, ours)})


PAPER = Paper(
    'maxk', 'MaxK-GNN: Extremely Fast GPU Kernel Design for Accelerating Graph Neural Networks '
    'Training', 'ASPLOS 2024, https://arxiv.org/abs/2312.08656', 'one NVIDIA A100 (80 GB)',
    [Maker('Figure 8', figure8)])
