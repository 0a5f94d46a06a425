from ._exhibit import Paper

PAPER = Paper('gat', 'gat', '', '', [])
