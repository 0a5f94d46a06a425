from ._exhibit import Paper

PAPER = Paper('sampled', 'sampled', '', '', [])
