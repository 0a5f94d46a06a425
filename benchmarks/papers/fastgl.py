from ._exhibit import Paper

PAPER = Paper('fastgl', 'fastgl', '', '', [])
