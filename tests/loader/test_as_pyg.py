"""Uses of PyG's loader besides iteration."""

import base64
import copy
import pickle
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.transforms as T
from torch.utils.data import DataLoader
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import CachedLoader, NeighborLoader, PrefetchLoader, ZipLoader
from torch_geometric.nn import GCN, GraphSAGE
from torch_geometric.sampler import NodeSamplerInput

from pyg_fast import accelerate
from pyg_fast.datasets import PlantedGraph
from pyg_fast.loader import FastNeighborLoader
from pyg_fast.transforms import ToCSR
from tests.loader._graphs import equal, random_data


def pyg_loader(data: Data, *args: Any, **kwargs: Any) -> NeighborLoader:
    pytest.importorskip('torch_sparse')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return NeighborLoader(data, *args, **kwargs)


def test_is_a_loader_of_pyg_and_torch() -> None:
    loader = FastNeighborLoader(random_data(), [3], batch_size=7, num_workers=4, dataset=range(3))
    assert isinstance(loader, NeighborLoader)
    assert isinstance(loader, DataLoader)
    assert (loader.num_workers, loader.dataset, loader.batch_size) == (0, range(60), 7)
    assert repr(loader).startswith('FastNeighborLoader(num_neighbors=[')
    assert list(loader.node_sampler.num_neighbors.values) == [3]


@pytest.mark.parametrize('model', [GraphSAGE, GCN])
@pytest.mark.parametrize('form', ['plain', 'prepared', 'adj_t', 'accelerated', 'cached'])
def test_inference_of_models(device: torch.device, model: type, form: str) -> None:
    data = random_data()
    data.x = data.x.double()  # Rounding tells nothing then.
    if form == 'adj_t':
        dense = torch.zeros(60, 60, dtype=torch.float64)
        dense[data.edge_index[1], data.edge_index[0]] = 1
        dense.fill_diagonal_(0)  # PyG's GCNConv adds loops to those of a sparse matrix.
        data.edge_index = dense.t().nonzero().t().contiguous()
        del data.edge_attr
    net = model(5, 8, 2, 3).double().eval().to(device)
    if model is GraphSAGE:  # A batch has all edges of its seeds.
        wanted = net(data.x.to(device), data.edge_index.to(device))
    else:
        wanted = net.inference(pyg_loader(data, [-1], batch_size=7), device).to(device)
    if form == 'adj_t':
        data.adj_t = dense.to_sparse_csr()
        del data.edge_index
    elif form == 'prepared':
        data = ToCSR()(data)
    elif form == 'accelerated':
        net = accelerate(net)
    loader = FastNeighborLoader(data, [-1], batch_size=7, device=device)
    got = net.inference(loader, device, embedding_device=device, cache=form == 'cached')
    torch.testing.assert_close(got, wanted)


def test_inference_needs_one_hop_of_all_nodes() -> None:
    net = GraphSAGE(5, 8, 2).eval()
    for args in (([3, 3], None), ([-1], [1, 2])):
        with pytest.raises(AssertionError):
            net.inference(FastNeighborLoader(random_data(), args[0], input_nodes=args[1]))


def test_called_with_seeds(device: torch.device) -> None:
    data, nodes = random_data(), torch.arange(59, -1, -1)
    loader = FastNeighborLoader(data, [-1], 7, nodes, seed=1, device=device, transform=tagged)
    for index in ([3], torch.tensor([3], dtype=torch.int32, device=device)):
        batch = loader(index)
        assert (batch.n_id[0], batch.input_id, batch.batch_size, batch.tag) == (56, 3, 1, 'mine')
        assert batch.x.device.type == device.type
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
        assert torch.equal(batch.edge_attr.cpu(), data.edge_attr[batch.e_id.cpu()])
    theirs = pyg_loader(data, [-1], input_nodes=nodes)([3, 40])
    batch = loader([3, 40])
    assert set(batch.n_id.tolist()) == set(theirs.n_id.tolist())
    assert batch.input_id.tolist() == theirs.input_id.tolist()
    assert loader.epoch == 0
    assert loader.stats.num_batches == 3
    for index, error in (([60], IndexError), ([-1], IndexError), ([0.5], TypeError)):
        with pytest.raises(error, match="'index' must give positions of seeds"):
            loader(index)


def tagged(batch: Data) -> Data:
    batch.tag = 'mine'
    return batch


def test_calls_sample_anew_and_come_again(device: torch.device) -> None:
    loaders = [
        FastNeighborLoader(random_data(60, 600), [2, 2], seed=5, device=device) for _ in range(2)
    ]
    first, second = ([loader(range(20)) for _ in range(2)] for loader in loaders)
    assert all(map(equal, first, second))
    assert not equal(*first)


def test_called_in_the_middle_of_an_epoch(device: torch.device) -> None:
    data = random_data(200, 1500)
    args = {'batch_size': 9, 'seed': 1, 'shuffle': True, 'device': device, 'features': 'host'}
    wanted = list(FastNeighborLoader(data, [3, 2], **args))
    loader = FastNeighborLoader(data, [3, 2], **args)
    got = []
    for batch in loader:
        got.append(batch)
        other = loader([1, 2])
        assert torch.equal(other.x.cpu(), data.x[other.n_id.cpu()])
    assert all(map(equal, wanted, got))


@pytest.mark.parametrize('num_workers', [0, 2])
def test_zip_loader(num_workers: int) -> None:
    data = random_data()
    loaders = [
        FastNeighborLoader(data, [k], input_nodes=range(k, 40), transform=tagged) for k in (1, 2)
    ]
    zipped = ZipLoader(loaders, batch_size=5, num_workers=num_workers)
    seen = 0
    for one, two in zipped:
        for k, batch in enumerate((one, two), 1):
            assert batch.tag == 'mine'
            assert batch.batch_size == min(5, 38 - seen)
            assert batch.n_id[0] == seen + k
            assert torch.equal(batch.x, data.x[batch.n_id])
        seen += 5
    assert len(zipped([0, 3])) == 2


def test_zip_loader_on_a_device(device: torch.device) -> None:
    data = random_data().to(device)
    zipped = ZipLoader([FastNeighborLoader(data, [k]) for k in (1, 2)], batch_size=5)
    for batches in zipped:
        for batch in batches:
            assert torch.equal(batch.x, data.x[batch.n_id])


def test_loader_of_torch_around_ours() -> None:
    data = random_data()
    loader = FastNeighborLoader(data, [3])
    for batch in DataLoader(loader.dataset, 7, collate_fn=loader.collate_fn, shuffle=True):
        assert torch.equal(batch.x, data.x[batch.n_id])


def test_cached_and_prefetch_loader(device: torch.device) -> None:
    loader = FastNeighborLoader(random_data(), [3], batch_size=7, seed=3, device=device)
    wanted = list(loader)
    loader.epoch = 0
    cached = CachedLoader(loader)
    assert all(map(equal, cached, wanted))
    assert all(map(equal, cached, wanted))
    loader.epoch = 0
    if device.type == 'cpu':
        fetched = list(PrefetchLoader(loader, torch.device('cpu')))
        assert len(fetched) == len(loader)
        assert all(map(equal, fetched, wanted))


COPIES: dict[str, Callable] = {
    'pickle': lambda loader: pickle.loads(pickle.dumps(loader)),
    'copy': copy.copy,
    'deepcopy': copy.deepcopy,
}


@pytest.mark.parametrize('how', COPIES)
@pytest.mark.parametrize(
    'options',
    [
        {'batch_size': 7, 'shuffle': True, 'input_nodes': torch.arange(60) % 3 == 0},
        {'batch_size': 4, 'input_nodes': [5, 3, 9], 'input_id': torch.tensor([1, 2, 0])},
        {'batch_size': 4, 'rank': 1, 'num_replicas': 3, 'drop_last': True, 'transform': tagged},
        {'batch_sampler': [[1, 2], [3, 4], [0]], 'weight_attr': 'weight'},
        {'sampler': [4, 5, 6, 1], 'batch_size': 2, 'subgraph_type': 'induced'},
        {'sampler': 'random_walk', 'features': 'host', 'cache_ratio': 0.2, 'topology': 'host'},
        {'generator': torch.Generator().manual_seed(3), 'shuffle': True, 'batch_size': 9},
    ],
)
def test_copies(device: torch.device, how: str, options: dict) -> None:
    data = random_data()
    data.weight = torch.rand(300)
    if 'generator' not in options:
        options = {**options, 'seed': 3}
    loader = FastNeighborLoader(data, [3, 2], device=device, **options)
    list(loader)
    loader.filter_per_worker, loader.mine = False, 'kept'
    other = COPIES[how](loader)
    assert type(other) is FastNeighborLoader
    assert (other.epoch, len(other), other.mine) == (1, len(loader), 'kept')
    assert (other.data is data) == (how == 'copy')
    for _ in range(2):
        assert all(map(equal, loader, other))
    assert other.epoch == loader.epoch == 3
    other.epoch = 0
    assert loader.epoch == 3
    assert equal(loader([1]), other([1]))


#: A pickled loader of version 0.2, compressed, in base 85.
OF_VERSION_0_2 = """
c-qxg&u<$=6!wp`o!D_`i~5TqQKTM>5LVQtp%n*8m9(HOE=?+74%KMAJN8VoyR$nx+cZd(!l9)>BY~7bTsUy#U*k_e;=nh%Y
qt&UiBngxH}mHCy*J-`?|XCL{3^S(;?W-@`!h22GBpf^7f?BjDW9>4kfdB2ed-o=N0szWDLgVC{a~J$f$jvJ@-nK7UYg`QR6
Nd%Zb>hmQ7E}J*KzAVnr)+daUPL9A$O_FAlL6Cl1{1e8Jzn{NHfyigvTVJk&yf5P@jCUA_0BGeQI>g=#JtM6}hrDR!e(?$6S
$V3=@~gCgLfBBqYiaP$Gp-vy8_x;)__(#|nB&uq~uL$#dN&)fvbxj{|GBJMnB_8ULOdx1pB<DH0L_1%%bfyeJ7RF6R)n&xX0
;VK%fThKsHKwigE?+NstHw0c&JWFnV14eRQjq)F)cG@`M!y+SNVrIid(F3)I8rB|SnPjtTutFp?@>6M#Sa@-9&%Pz3fZiAgU
%qQ&PNS{goI?oimEK+c&&%J_`#gKa;jvN4!3*;*W&y$dDR@j6zCcYPj*hXN4t9f90Ss~roRLBU69*>h;kyr#c!2>gJTW-^>y
ESSdw>#YazFYopQ;F5dDGCQMAj&E{M9`v%@R`j<yYO2SO$#ZMsDsnTi?)(?NrWZwV!8)3EaHwu-01T~uE>mvh$_kbGGFDMV~
_YEN2`PeGuTi{5+82aHN9drwjliiLTKs}1XyP1k(aert=9cQKG$oLOcjB>|62cc(?g@^{_Rjqyl|&lFJf83c@p%&tXS0_8@*
B%9Vw~~y-6gseHY9FdUP4T9_W6lws3Hw=w>pNA|jK0h1?vOoA1_ZwS&e_-SD5^Z~cAo;h*1}A09Nm{;P@aCuwakJ^_9}_bB0
ukUX*_B;vFVg>fG{Ay+D-gvJ5);<WL6Y#BxEC$#9BENwnXox!*TVa9}1Y0GVln^^H!rES+4JJyDXXKBZE@*F+~<BnA>Lr!ac
afI$I1g<Jzx@mp93Z3ig>sK~5u3Wu#Wn+D9EiLW(NuD;{_DH49Jy?5?)?TMu_lE7-%g@2*__~2Vd=BvW<A!+(z5;W#pBlIR6
phlu`9ta}93PPP?pofU!6x^W&D6G0mfyNX)qp_gW5Y%RcJJoHw*lTeP<a!&S1(_`eC-u<SKo+ksS9*hYp*`_>fNZ`&Fbw`@7
Dj+pYPAJ)^Iz|jN5VR&&(nFuF6iXJ0$U>Wm)zaXx8_9MuVbz4f__fOs5`ZMNp=cwRO{uw4=i2fNkm}+tBv`zHMq}ba!*B*!m
fp?k`MeXKVBJT!dxo?)@*fwySlXPr%)ssTX5vfyEj&G~L?s!d=VpooWQ2&iYwCnMp5U#OC=mq){>dZ~{gK73@^%^T2ummt~o
HVc}f&_UzbJ<v~Z7SaYVH4-tZxz{Hltd4|Cx75M#7cl{iN5*5rg((U>9Z508Tg#bRAD2&qA(v*5Cm!KByc)1dgD3ORz%=QgC
LK9ic35Et2=Jq^$x)t(>TmMc*;o7aUkIU|P?=A11PuJFtbCdI??x}RqJ;$rOd8{jH$Ew|_IBHSp?30mhMfO&J8H(B}FFDBJ9
;iv|8Fwi!vW3Y6ypgLj{~4v#Mr)^dFJ{qlaW^Ssu4AtkxC*g+It{6Lj++Mi&8=$(^|fmU^@>%tmCb!GvspbmVjqrdCk+1u3$
B3;
"""


def test_a_loader_that_version_0_2_pickled() -> None:
    loader = pickle.loads(zlib.decompress(base64.b85decode(OF_VERSION_0_2.replace('\n', ''))))
    first, second = loader
    assert (loader.epoch, first.batch_size, len(loader)) == (1, 2, 2)
    assert (first.n_id.tolist(), second.n_id.tolist()) == ([3, 5, 2, 0, 4, 1], [1, 0, 5, 4])
    assert (first.e_id.tolist(), second.e_id.tolist()) == ([2, 6, 4, 1, 5, 3], [0, 5, 4])
    assert (first.input_id.tolist(), second.input_id.tolist()) == ([1, 0], [2, 3])
    assert list(map(equal, pickle.loads(pickle.dumps(loader)), loader)) == [True, True]


def test_copies_own_their_data(device: torch.device) -> None:
    data = random_data()
    data.x.abs_().add_(1)
    loader = FastNeighborLoader(data, [3], device=device)
    deep, shallow = copy.deepcopy(loader), copy.copy(loader)
    data.x.zero_()
    assert (deep([1, 2]).x > 0).all()
    assert (shallow([1, 2]).x == 0).all()


def test_seeds_can_be_read_and_not_written() -> None:
    nodes = torch.tensor([4, 2, 9])
    loader = FastNeighborLoader(random_data(), [3], input_nodes=nodes, batch_size=3)
    assert loader.input_nodes is nodes
    assert isinstance(loader.input_data, NodeSamplerInput)
    assert torch.equal(loader.input_data.node, nodes)
    loader.input_data.node.fill_(10**9)
    assert next(iter(loader)).n_id[:3].tolist() == [4, 2, 9]
    mask = torch.arange(60) % 20 == 0
    loader = FastNeighborLoader(random_data(), [3], input_nodes=mask)
    assert loader.input_data.input_id.tolist() == [0, 20, 40]


def test_what_is_refused() -> None:
    loader = FastNeighborLoader(random_data(), [3])
    with pytest.raises(ValueError, match='worker processes.*taskset'):
        loader.enable_cpu_affinity()
    with pytest.raises(ValueError, match=r'worker processes.*set_num_threads'):
        loader.enable_multithreading()
    for name in ('data', 'input_data', 'node_sampler', 'custom_cls', 'transform_sampler_output'):
        with pytest.raises(AttributeError):
            setattr(loader, name, None)
    with pytest.raises(NotImplementedError, match='call the loader'):
        loader.node_sampler.sample_from_nodes(loader.input_data)
    with pytest.raises(NotImplementedError, match='LinkNeighborLoader'):
        loader.node_sampler.sample_from_edges(None)
    with pytest.raises(TypeError, match="'collate_fn' must not be given: use 'transform'"):
        FastNeighborLoader(random_data(), [3], collate_fn=loader.collate_fn)
    assert FastNeighborLoader(random_data(), [3], collate_fn=None).collate_fn([1]).batch_size == 1


@pytest.mark.parametrize(
    ('transform', 'stale'),
    [(T.AddSelfLoops(), True), (T.GCNNorm(), True), (T.ToUndirected(), True),
     (T.LargestConnectedComponents(), False), (T.NormalizeFeatures(), False)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_warns_of_a_permutation_of_other_edges(transform: T.BaseTransform, stale: bool) -> None:
    data = random_data()
    del data.edge_attr  # AddSelfLoops leaves it as it is.
    data = transform(ToCSR()(data))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always', UserWarning)
        FastNeighborLoader(data, [3])
        FastNeighborLoader(ToCSR()(data), [3])
    found = [str(w.message) for w in caught if 'permutation' in str(w.message)]
    assert found == stale * [
        f"'data.e_perm' is not the permutation of the {data.num_edges} edges any more: a transform "
        'after ToCSR has added, merged or dropped edges. Apply ToCSR last'
    ]
    assert all(w.filename == __file__ for w in caught)


def test_warns_of_an_empty_mask(device: torch.device) -> None:
    data = random_data()
    data.mine = torch.zeros(data.num_nodes, dtype=torch.bool)
    expected = r"'input_nodes' \(data.mine\) is a mask of \d+ nodes that is False everywhere"
    with pytest.warns(UserWarning, match=expected) as caught:
        loader = FastNeighborLoader(data, [3], input_nodes=data.mine, shuffle=True, device=device)
    assert caught[0].filename == __file__
    assert list(loader) == []
    typed = HeteroData({'a': {'x': data.x}, ('a', 'to', 'a'): {'edge_index': data.edge_index}})
    with pytest.warns(UserWarning, match=r"'input_nodes' is a mask"):
        FastNeighborLoader(typed, [3], input_nodes=('a', data.mine), device=device)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        none = torch.empty(0, dtype=torch.long)  # the share of a process, for example
        assert list(FastNeighborLoader(data, [3], input_nodes=none, device=device)) == []


def test_batches_leave_out_the_permutation_of_the_edges(device: torch.device) -> None:
    plain = PlantedGraph('tiny')[0]
    edge_attr = torch.rand(plain.num_edges)  # kept outside of the data
    data = ToCSR()(plain)
    batch = next(iter(FastNeighborLoader(data, num_neighbors=[3], batch_size=5, device=device)))
    assert 'e_perm' in data
    assert 'e_perm' not in batch
    src, dst = plain.edge_index[:, data.e_perm[batch.e_id.cpu()]]
    n_id, edge_index = batch.n_id.cpu(), batch.edge_index.as_tensor().cpu()
    assert torch.equal(n_id[edge_index], torch.stack([src, dst]))
    assert edge_attr[data.e_perm[batch.e_id.cpu()]].numel() == batch.edge_index.size(1)
