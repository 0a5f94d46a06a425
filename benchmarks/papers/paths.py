from ._exhibit import Paper

PAPER = Paper('paths', 'paths', '', '', [])
