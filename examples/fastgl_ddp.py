"""Trains as fastgl_training.py does, on several GPUs, each with batches of its own.

    torchrun --nproc-per-node=2 examples/fastgl_ddp.py --size arxiv-like

With --features sharded each process holds a part of the features on its device, and reads from the
others what its batches need. On several machines start one torchrun on each, with the address of
the first; here are two on one machine:

    torchrun --nnodes 2 --node-rank 0 --rdzv-endpoint 127.0.0.1:29500 --nproc-per-node 1 \\
        examples/fastgl_ddp.py --size small --features sharded --device cpu &
    torchrun --nnodes 2 --node-rank 1 --rdzv-endpoint 127.0.0.1:29500 --nproc-per-node 1 \\
        examples/fastgl_ddp.py --size small --features sharded --device cpu

There is one copy of the graph in host memory, which all processes of a machine map. In each step
every process takes as many of the training nodes; gradients are averaged by NCCL, or by gloo where
there is no GPU. All processes infer, each a part of the nodes. --batch-size is that of each, an
epoch's time that of the slowest. A process that fails stops the others.
"""
from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
from dataclasses import asdict

import torch
import torch.distributed as dist
from fastgl_training import (
    Inference,
    Outcome,
    Point,
    build,
    checked,
    inference_graph,
    line,
    load_data,
    new_loader,
    nodes_of,
    options,
    record,
    size,
    summary,
    title,
    train,
    with_degrees,
)
from node_classification import at_least, now
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data

from pyg_fast.loader import ShardedFeatures, share_data
from pyg_fast.transforms import ToCSR


def run(args: argparse.Namespace) -> Outcome:
    """Trains in this process and the others."""
    rank, count = dist.get_rank(), dist.get_world_size()
    device = torch.device(args.device)
    part = {'rank': rank, 'num_replicas': count}

    def loaded() -> tuple:
        data, num_classes = load_data(args)
        return ToCSR()(with_degrees(data, args)), num_classes

    data, num_classes = share_data(loaded)
    outcome, in_channels = Outcome(size(data, num_classes), [[]]), data.num_features
    if args.features == 'sharded':
        data = with_shards(data, device)
    parts = {name: nodes.to(device) for name, nodes in nodes_of(data, args.seed).items()}
    torch.manual_seed(args.seed)
    model = build(args, in_channels, num_classes).to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=args.weight_decay)
    batches = new_loader(data, parts['train'].cpu(), args.fanout, args, seed=args.seed, **part)
    infer, labels = None, data.y.to(device)
    if args.evaluate_every:
        graph, x = share_data(lambda: ToCSR()(inference_graph(data, args))), data.x
        if args.features == 'sharded':
            graph.x, x = data.x, None
        infer = Inference(graph, x, args, dist.all_reduce, **part)
    for epoch in range(args.epochs):
        dist.barrier()
        start = now(device)
        loss = train(parallel, optimizer, batches, args)
        seconds = torch.tensor(now(device) - start, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        mean_loss = torch.tensor(loss, device=device)
        dist.all_reduce(mean_loss)
        val = test = None
        if infer is not None and (epoch + 1) % args.evaluate_every == 0:
            right = infer(model).argmax(dim=-1) == labels
            val, test = (right[parts[name]].float().mean().item() for name in ('val', 'test'))
        outcome.runs[0].append(Point(seconds.item(), mean_loss.item() / count, val, test))
        if rank == 0:
            print(line(args.seed, epoch, outcome.runs[0][-1]), flush=True)
    outcome.stats = asdict(batches.stats)
    return outcome


def with_shards(data: Data, device: torch.device) -> Data:
    """Returns a graph with this process's part of the features, for all loaders."""
    data, num_nodes = copy.copy(data), data.num_nodes
    data.x, data.num_nodes = ShardedFeatures.split(data.x, device=device), num_nodes
    return data


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, all filled in and checked."""
    parser = options(__doc__, ('auto', 'host', 'device', 'sharded'))
    parser.add_argument(
        '--timeout', type=at_least(1, float), default=600.0, metavar='S',
        help='seconds after which a process that does not answer is given up (default: 600)')
    parser.set_defaults(loader='fast', workers=0, runs=1)
    args = checked(parser, argv)
    if 'RANK' not in os.environ:
        parser.error('start it by torchrun --nproc-per-node=N examples/fastgl_ddp.py ...')
    if args.device == 'cuda':
        place = int(os.environ['LOCAL_RANK'])
        if place >= torch.cuda.device_count():
            parser.error(f'there are {torch.cuda.device_count()} GPUs, process {place} has none')
        args.device = f'cuda:{place}'
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = parse(argv)
    timeout = datetime.timedelta(seconds=args.timeout)
    if args.device == 'cpu':
        dist.init_process_group('gloo', timeout=timeout)
    else:
        torch.cuda.set_device(args.device)
        dist.init_process_group('nccl', timeout=timeout, device_id=torch.device(args.device))
    rank = dist.get_rank()
    if rank == 0:
        print(f'{title(args)}; {dist.get_world_size()} processes', flush=True)
    outcome = run(args)  # after a failure, the other processes must not wait for this one
    if rank == 0:
        print(f'\n{summary(outcome)}')
        if args.json is not None:
            seconds = [point.seconds for point in outcome.runs[0]]
            told = record(args, outcome) | {
                'processes': dist.get_world_size(), 'seconds': seconds}
            args.json.write_text(json.dumps(told, indent=1) + '\n', encoding='utf-8')
            print(f'\nwrote {args.json}')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
