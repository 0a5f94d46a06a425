"""Papers in rooms of their own: layers, ops and transforms that only one published system needs.

A room may import the core and other rooms; the core imports none. The public names of rooms are
those of :mod:`pyg_fast.nn`, :mod:`pyg_fast.graph`, :mod:`pyg_fast.ops` and
:mod:`pyg_fast.transforms`.
"""

from . import maxk as maxk
from . import paths as paths
from . import reorder as reorder
from . import sampling as sampling
