"""The order of the batches of a window."""

from torch import Tensor


def greedy_order(degree: Tensor) -> list[int]:
    r"""The batches of a window, starting with the first one; each is followed by the remaining
    batch that shares most nodes with it (ties: the first).

    Args:
        degree (Tensor): Match degrees of all pairs :math:`(B, B)`.
    """
    rows = degree.tolist()
    order, rest = [0], list(range(1, len(rows)))
    while rest:
        row = rows[order[-1]]
        order.append(max(rest, key=lambda k: row[k]))
        rest.remove(order[-1])
    return order
