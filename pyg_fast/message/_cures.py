"""What helps where PyG's own code runs in place of a kernel, by the reason that reports show."""

import re

_DTYPES = 'float32, float64, float16 or bfloat16 features'
_AGGRS = "aggr='sum', 'mean', 'max', 'min', 'var' or 'std', each once"

FAILS = "another message or input, as the error of the call tells: with PyG's code, too, it fails"

# By a pattern of the reason; the first that fits counts.
_OF_DEGREES = (
    'the degree of each node as a column, computed in forward and passed to propagate '
    "(deg=deg.view(-1, 1) gives deg_i), or aggr='mean'"
)
_OF_COUNTS = (
    'size_i, an argument of message, for the number of nodes, as in '
    'torch_geometric.utils.softmax(x, index, num_nodes=size_i)'
)
# Of a number for each edge that chooses among its channels, or among results of several maps.
_OF_CHOICES = (
    'torch.where for each type, as out = torch.where((edge_type == r).view(-1, 1), '
    'self.lins[r](x_j), out); or of h = torch.stack(results, 1) with a row for each type '
    '(F.one_hot(edge_type, num_types).to(h.dtype).unsqueeze(-1) * h).sum(1)'
)
_OF_NOISE = (
    'the noise drawn in forward with a row for each edge, as by torch.randn(edge_index.size(1), '
    '16), and passed to propagate'
)
# By what is refused and what the user's line calls.
_BY_LINE = (
    (r'^aten\.scatter_add', r'\bdegree\(', _OF_DEGREES),
    (r'^the number of edges or nodes is used', r'\b(rand|randn|randint|bernoulli)\(', _OF_NOISE),
    (
        r'^a number that changes',
        r'\b(softmax|scatter)\([^()]*(, |=)(?!size_i|dim_size)[\w.]+\)',
        _OF_COUNTS,
    ),
    (
        r'^aten\.arange|^the number of edges or nodes is used',
        r'\[.*\barange\(|\barange\((len\(|\w+\.(size\(0\)|shape\[0\]))',
        _OF_CHOICES,
    ),
)
_CURES = [
    (r'over the edges of each source|size_j', 'what reads all edges of a source, or how many '
     'sources there are, in forward, and given to propagate: alpha=torch_geometric.utils.softmax('
     "score, edge_index[0], num_nodes=x.size(0)); with flow='target_to_source' edge_index[1]"),
    (r'depends on other edges, and not by softmax', "for a variance aggr='var' or 'std', or in "
     'aggregate the mean of inputs and that of inputs * inputs; a softmax over the neighbours; '
     'else a call of propagate for each round, as propagate(edge_index, x=x, mean=mean) with '
     'mean_i in message'),
    (r'^MulAggregation', "for positive numbers aggr='sum' of x_j.log() in message, and .exp() of "
     'what propagate returns'),
    (r'checkpoint in message', 'torch.utils.checkpoint around the layer, or none: most kernels '
     'keep no tensor of edges times channels for their backward pass'),
    (r'without node_dim=', 'a column of a number for each node, in propagate: deg=deg.view(-1, 1)'),
    (r'others or size= say|^sizes that differ', 'a row for each node in all features of nodes, '
     'and as many as size= says; a pair x=(x_src, x_dst) for edges between two types of nodes; '
     'node_dim=0 for features of shape [nodes, heads, channels]'),
    (r', no tensor$', 'tensors, as of torch.from_numpy(x)'),
    (r'^aggr=None', "aggr='sum' or another one: with PyG's code, too, the call fails"),
    (r'^message returns no tensor', 'a tensor as the result of message; several go through an '
     'aggregate of your own, or are joined by torch.cat'),
    (r'^a message of \d+ dim|Number of dimensions of tensors must match', 'keepdim=True or '
     '.unsqueeze(-1), which makes a column of a number for each edge'),
    (r'has shape \[num_edges, 1\]', 'edge_type.view(-1), which takes one row of a table for each '
     'edge'),
    (r'scalar types: Long, Int|used as indices must be', 'integers for a table or an Embedding: '
     'kind.long()'),
    (r'^a product of dtypes|same dtype', "features of the weights' dtype: x.float(), or "
     'model.double()'),
    (r'^message (raises|combines values)|^an index of channels beyond|'
     r'^message cannot be traced: \w+Error: .*must match',
     FAILS),
    (r'has (spectral|weight)_norm,', 'the functions of torch.nn.utils.parametrizations: there '
     'weight_norm has a kernel; for spectral_norm w = self.lin.weight once in forward, given to '
     'propagate, and F.linear(x_j, w) in message'),
    (r'perhaps by a hook of', 'no hook that stores something, or the module called in forward'),
    (r'calls (print|breakpoint|input)\b', 'print in forward, or remove the call'),
    (r'calls a logger|calls warnings', 'the call in forward, or remove it'),
    (r'calls [\w.]+, which', 'call it in forward, and pass its result to propagate'),
    (r'__main__ lacks', "the profiler in the script: cProfile.run('main()')"),
    (r'no input of nodes', 'the number of nodes: propagate(edge_index, size=(n, n), ...); features '
     'of nodes are x_i or x_j in message'),
    (r'of parameters (has no kernel|alone)', 'what parameters alone give computed once in forward '
     'and given to propagate, as w = self.lin.weight, and F.linear(x_j, w) in message'),
    (r'^aten\.(tril|triu)\b', 'a product with a mask that is a buffer, as of '
     'torch.ones(4, 4).tril()'),
    (r'aten\.(arange|linspace|full|ones|zeros|eye)\b|a constant tensor', 'a buffer of the '
     "layer: self.register_buffer('steps', torch.arange(8192.)); for channels a list of numbers, "
     'x_j[:, [2, 0, 1]]'),
    (r'^aten\.erfc', '1 - torch.erf(x), which is less exact where it is small'),
    (r'^aten\.(remainder|fmod)|^a remainder of', 'x - c * torch.floor(x / c) for x % c, and '
     'x - c * torch.round(x / c) for the nearest image in a period c'),
    (r'^aten\.floor_divide|a division that rounds', 'torch.floor(x / c)'),
    (r'^aten\.round\.decimals', 'torch.round(x * 100) / 100'),
    (r'^an LSTM, GRU or RNN', 'the LSTM of nodes in forward; for one step torch.nn.GRUCell, as in '
     'self.cell(x_j, x_i)'),
    (r"^'update' reads", 'that part of update in forward, after propagate'),
    (r'^a conversion to b?float', 'what propagate gets converted in forward, as x.half(), or '
     'torch.autocast around the layer'),
    (r'^a norm of order', 'an order that is not negative'),
    (r'^a norm that converts', 'x.double().norm(dim=-1), as the features of the layer'),
    (r'^rrelu', 'F.leaky_relu, or F.rrelu in evaluation'),
    (r'^a cumulative sum of', 'x @ self.sums with a buffer torch.ones(c, c).triu()'),
    (r'^a (cumulative )?product of', 'sums of logarithms of positive numbers: '
     'x.log().sum(-1).exp()'),
    (r'^aten\.(bucketize|searchsorted)', 'bucket=torch.bucketize(x, bounds) in '
     'forward, given to propagate'),
    (r'^aten\.(sort|topk|kthvalue|median|nanmedian|mode|argmax|argmin|argsort|msort)\b',
     'amax and amin for the largest and smallest channel; the operation in forward where it reads '
     'nodes or features of edges alone'),
    (r'^aten\.convolution', 'a Linear of the channels, or the convolution of nodes in forward'),
    (r'^aten\._?linalg_det', 'the determinant written out: m[:, 0, 0] * m[:, 1, 1] - m[:, 0, 1] * '
     'm[:, 1, 0] of two rows, (m[:, 0] * torch.linalg.cross(m[:, 1], m[:, 2])).sum(-1) of three'),
    (r'^aten\._?linalg_|^aten\.(inverse|cholesky|svd|qr)', 'small matrices written out, as '
     'a * d - b * c for a determinant; or in forward, for features of edges'),
    (r'^dropout of what', 'dropout of a feature of edges that propagate gets, as of ones'),
    (r'^a flip of', 'x.flip(1) in forward, on the nodes'),
    (r'a number for each edge, of shape \[num_edges\]', '.unsqueeze(-1) or .view(-1, 1) makes a '
     'column of a number for each edge, as ea.mean(-1, keepdim=True) does; beside heads '
     '.view(-1, 1, 1)'),
    (r'is invalid for input of size', 'view(-1, heads, channels), which keeps a row for each edge'),
    (r'^\w+Error: .*(number of edges|num_edges)',
     'a tensor with a row for each edge goes to propagate, as an argument of message'),
    (r'MultiheadAttention in message', 'attention over the neighbours as a softmax of scores: '
     'softmax((q_i * k_j).sum(-1, keepdim=True), index) * v_j, as TransformerConv has it; '
     'MultiheadAttention over nodes in forward'),
    (r'autograd\.Function', "torch's operations with detach, for a straight-through gradient "
     'y + (z - y).detach(); or the function in forward'),
    (r'aten\.(rand|bernoulli|normal|exponential|uniform|cauchy|geometric|log_normal|multinomial|'
     r'poisson)', _OF_NOISE),
    (r'a conversion to (int|bool)', 'in place of one_hot rows of a buffer by an integer that '
     'propagate gets: self.eye[kind] of torch.eye(5); of a count first (x_j > 0).sum(-1)'
     '.to(x_j.dtype); other conversions in forward'),
    (r'complex|aten\._fft', 'real and imaginary parts by hand, as halves of the channels; a '
     'Fourier transform as a product with buffers of sines and cosines, or of nodes in forward'),
    (r'^arithmetic of (u?int|bool)', 'kind.to(x_j.dtype) in message before the arithmetic, or its '
     'result from forward'),
    (r'a comparison of int', 'the comparison in forward, and its mask to propagate: '
     'mask=(edge_index[1] > edge_index[0]).view(-1, 1)'),
    (r'reads a tensor of \d+ rows', 'a tensor with a row for each edge goes to propagate, as an '
     'argument of message'),
    (r'aten\._?cdist', 'torch.cdist of one row each is a norm: (x_i - x_j).norm(dim=-1)'),
    (r'aten\._trilinear', 'nn.Bilinear as a map and a sum: '
     '(torch.einsum("ei,oij->eoj", x_i, weight) * x_j[:, None]).sum(-1)'),
    (r'too many operations', 'fewer lines: loops whose rounds share weights may run in forward, '
     'between calls of propagate'),
    (r"reads 'size|counts edges", _OF_DEGREES),
    (r'batched product|aten\.bmm', 'x @ w or a Linear; for a matrix of each head a product and a '
     'sum: (x_j.view(-1, h, c, 1) * w).sum(2)'),
    (r'a variance of linear maps', 'var or std in a layer of its own: a kernel runs other '
     'aggregations'),
    (r'numbers of a table', 'for each type (edge_type == t).view(-1, 1) * (x_j @ w[t]), added up'),
    (r'^aten\.gather', '(F.one_hot(kind, channels).to(x_j.dtype) * x_j).sum(-1, keepdim=True) for '
     'x_j.gather(1, kind.view(-1, 1)), and of h with a row for each type (F.one_hot(kind, '
     'num_types).to(h.dtype).unsqueeze(-1) * h).sum(1); for the same channels of all edges a list '
     'of numbers, x_j[:, [2, 0, 1]]'),
    (r'aten\.(index\.Tensor|index_select|gather)', 'a list of numbers for indices of channels, '
     'x_j[:, [2, 0, 1]], or slices and torch.cat; what nodes have in forward'),
    (r'aten\.index_put', 'torch.where(mask, values, x) in place of x[mask] = values'),
    (r'an index of more than', 'x.index_select(1, index) in forward, on the nodes'),
    (r'across the edges|a reduction over edges|^aten\.(max|min)\.dim along the edges|'
     r'^aten\.norm\.default', 'what all edges give together computed in forward, where x_j is '
     'x[edge_index[0]] and x_i is x[edge_index[1]], and given to propagate: propagate(edge_index, '
     'x=x, mean=x[edge_index[0]].mean(0, keepdim=True)), or largest=score.max(); of the neighbours '
     'of a node aggr, or torch_geometric.utils.softmax(x, index, num_nodes=size_i)'),
    (r'^message calls one_hot without', 'the number of classes: F.one_hot(edge_type, 5).float()'),
    (r'^one_hot without', 'a conversion: F.one_hot(edge_type, 5).float(), or .to(x_j.dtype)'),
    (r'^aten\.(scatter_reduce|scatter_add)\b', _OF_COUNTS),
    (r'cat\.default along the edges', 'a tuple of messages, or torch.stack(..., 1)'),
    (r'message asserts', 'the assertion in forward, on what propagate gets'),
    (r'^the shape of a value depends', 'torch.where in place of a mask as an index, as out = '
     'torch.where((edge_type == r).view(-1, 1), self.lins[r](x_j), out); nonzero() or unique() in '
     'forward'),
    (r'asks for the number of edges', 'nothing in message that depends on how many edges there '
     'are; a norm of matrices written out, as m.abs().sum(-2).amax(-1) for ord=1'),
    (r'^aggregate returns a row for each edge', 'values of edges computed in forward, from '
     'x[edge_index[0]] and x[edge_index[1]]: what aggregate returns has a row for each node'),
    (r'^aggregate returns no tensor', 'a tensor as the result of aggregate, or several in a tuple, '
     'list or dict'),
    (r'values? of a tensor', 'torch.where in place of if; no item(), tolist() or mask as an index'),
    (r'^a number of nodes in message', 'size_i, an argument of message, for the number of nodes'),
    (r'a number that changes|message that changed', 'a tensor in place of the number, changed in '
     "forward: self.register_buffer('step', torch.zeros(()))"),
    (r'sets an attribute|global$', 'the attribute set in forward or update; for values of edges '
     'an attribute of their own, as self.alpha = alpha in message'),
    (r'^\d+ edges$|(too|so) few|takes longer than|fit into memory|'
     'as many edges as destinations',
     "little: PyG's code is as fast here; with pyg_fast.small_graphs('kernel') a kernel runs, or "
     'the report tells why none can'),
    (r'^an edge_index of shape', 'an edge_index of shape [2, num_edges]: '
     'edge_index.t().contiguous()'),
    (r'edge_index of type (list|tuple|ndarray)', 'torch.as_tensor(edge_index)'),
    (r'edge_index of type', 'an edge_index for each layer: a dict goes to HeteroConv or HGTConv'),
    (r'sparse matrix', 'an edge_index in place of the sparse matrix'),
    (r'TorchScript|jit', 'torch.compile in place of TorchScript'),
    (r'torch\.(func|fx|export)|forward-mode', 'a call outside of the transform; to export, '
     'pyg_fast.export'),
    (r'torch\.compile did not tell', 'a call without torch.compile, whose error or report tells '
     'more'),
    (r'torch\.compile (is active|has another backend)|does not tell what it captured',
     'pyg_fast.compile(model)'),
    (r'fuse=False', 'fuse=True'),
    (r'return_attention_weights', 'a call without return_attention_weights'),
    (r'explain', 'explain = False, once the model is explained'),
    (r'attn_type=', "attn_type='multihead'"),
    (r'add_bias_kv|add_zero_attn', 'attn_kwargs without that option'),
    (r'its attention (is|has batch_first)', 'the MultiheadAttention that GPSConv makes'),
    (r'heads of \d+ channels', 'more heads, of at most 256 channels (float64: 128)'),
    (r'compute capability', 'a newer GPU'),
    (r'^a batch ', 'as batch the graph of each node, int64, on the device of the features'),
    (r'^data in message', 'detach() in place of .data'),
    (r'used as a number', 'the number as a tensor that forward makes and propagate gets'),
    (r'graph break', 'pyg_fast.compile(model, fullgraph=True) names the line'),
    (r'^in compiled code no', 'a call without torch.compile, whose report tells more'),
    (r'hooks', 'no hooks while it trains'),
    (r'BatchNorm|batch normalization', 'normalize the nodes in forward, or use LayerNorm'),
    (r'writes? into', 'the write in forward or update, after propagate; in message new tensors'),
    (r'(converts to|calls) NumPy', "torch's operations in place of NumPy's, and of numbers math's"),
    (r'fill_value=', "fill_value='mean' or a number, or add_self_loops=False"),
    (r'aggr=', "aggr='add': this layer has kernels for sums alone"),
    (r'overrid|patched|replaced|observed', "PyG's own methods: changes belong into message"),
    (r'aggregation is listed|Aggregation has no|semi_grad|clamp_min', _AGGRS),
    (r'node_dim=', 'node_dim=-2, its default'),
    (r'decomposed_layers=', 'decomposed_layers=1, its default'),
    (r"reads '|message uses '|gathers", 'arguments of message that end in _i and _j: propagate('
     'edge_index, x=x) gives x_i and x_j'),
    (r'mix(es|ed)? (edges|nodes)|along the edges|other edges|over edges|of the edges',
     'what one edge needs alone in message, a softmax over its neighbours, the rest in update'),
    (r'torch\.(float|int|bool|uint|complex)|int64|of bool|dtype', _DTYPES),
    (r' is on | on \w+(:\d)?, the edges', 'model, features and edges on one device'),
    (r'missing|no input|no relations', 'all arguments of message in the call of propagate'),
    (r'features that|of shape|dimensions|is a ', 'features of shape [nodes, channels]'),
    (r'autocast|gradients changes|no_grad', 'autocast and no_grad around the whole layer'),
    (r'has no kernel|cannot be traced|no reference', 'the operation in forward, before propagate, '
     'where it reads nodes or features of edges alone, or in update after the sum; else another '
     'operation'),
]  # fmt: skip


_OF_LAYER_NORM = (
    "torch.nn.LayerNorm, or norm_kwargs=dict(mode='node') of an MLP: PyG's LayerNorm takes mean "
    'and variance of all edges together'
)


_OF_NORMS = (
    'the norm of nodes in forward, or torch.nn.LayerNorm in message: this one takes statistics of '
    'all edges together'
)


def cure_of(reason: str) -> str:
    """What helps against a reason for PyG's code; a page of the manual where nothing else does."""
    what, _, place = reason.partition(' (File ')  # The user's code may hold any word.
    norm = re.match(r'"[^"]*torch_geometric.nn.norm.(\w+)\.py"', place)
    if norm is not None:
        return _OF_LAYER_NORM if norm[1] == 'layer_norm' else _OF_NORMS
    for pattern, line, cure in _BY_LINE:
        if re.search(pattern, what) and re.search(line, place):
            return cure
    for pattern, cure in _CURES:
        if re.search(pattern, what):
            return cure
    return 'the page "What a layer may contain" lists what kernels take'
