# SPDX-License-Identifier: MIT
"""Run a checkpoint through SGLang's own model runner and memory pools, without a server.

A program of its own, because the platform replaces functions of torch and SGLang for good.

Usage: `run_model.py <checkpoint> <jobs.pt> <results.pt> <dtype>`. A job is a pair: the prompts, and steps. A
step says up to which position each prompt is computed next, all prompts in one batch; `DECODE` stands for one
token more by the decode path, and the name of a pool for losing its contents. The result of a job is each
prompt's final hidden states.
"""

from __future__ import annotations

import os
import sys
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING

# Before the imports below: SGLang asks for its platform while it is imported.
os.environ |= {"SGLANG_PLATFORM": "cpu_reference", "SGLANG_USE_CPU_ENGINE": "0", "CUDA_VISIBLE_DEVICES": ""}

import torch
from sglang.srt.plugins import load_plugins

load_plugins()

# ruff: noqa: E402 - what follows must find the plugins in place.
from sglang.benchmark import one_batch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

DECODE = "decode"


def load(checkpoint: str, dtype: str) -> ModelRunner:
    server_args = ServerArgs(
        model_path=checkpoint,
        dtype=dtype,
        device="cpu",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        swa_full_tokens_ratio=1.0,
        max_total_tokens=8192,
        max_running_requests=4,
    )
    port = PortArgs.init_new(server_args).nccl_port
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    model_config = ModelConfig.from_server_args(server_args)
    bootstrap.init_parallel_runtime(server_args=server_args, device="cpu", dist_port=port)
    bootstrap.init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config, mem_fraction_static=0.5, gpu_id=0, nccl_port=port, server_args=server_args
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner


def run(runner: ModelRunner, prompts: list[list[int]], steps: list[object]) -> list[torch.Tensor]:
    """Compute the prompts step by step, and return `[tokens, hidden]` for each."""
    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    states: list[list[torch.Tensor]] = [[] for _ in prompts]
    requests = [_request(number, prompt) for number, prompt in enumerate(prompts)]
    batch, done = None, [0] * len(prompts)
    pools = _pools(runner.token_to_kv_pool)
    for step in steps:
        if isinstance(step, str) and step != DECODE:
            for buffer in pools[step]:
                buffer.zero_()
            continue
        ends = [end + 1 for end in done] if step == DECODE else list(step)
        with torch.no_grad(), _captured(runner) as captured:
            if step == DECODE:
                tokens = torch.tensor([prompt[end] for prompt, end in zip(prompts, done, strict=True)])
                one_batch.decode(tokens, batch, runner)
            else:
                for request, prompt, start, end in zip(requests, prompts, done, ends, strict=True):
                    request.full_untruncated_fill_ids = array("q", prompt[:end])
                    request.prefix_len, request.extend_end, request.logprob_start_len = start, end, -1
                batch = one_batch.extend(requests, runner)[2]
        lengths = [end - start for start, end in zip(done, ends, strict=True)]
        for kept, part in zip(states, captured[0].split(lengths), strict=True):
            kept.append(part)
        done = ends
    return [torch.cat(kept) for kept in states]


def _pools(pool: DeepSeekV4TokenToKVPool) -> dict[str, list[torch.Tensor]]:
    """Return the device side of the pools that SGLang stores, by their names there."""

    def rows(states: list[CompressStatePool | None]) -> list[torch.Tensor]:
        return [state.kv_score_buffer.kv_score for state in states if state is not None and state.ratio == 4]

    return {
        "swa": pool.swa_kv_pool.kv_buffer,
        "deepseek_v4_c4": pool.kv_pools[4].kv_buffer,
        "deepseek_v4_c128": pool.kv_pools[128].kv_buffer,
        "deepseek_v4_c4_indexer": pool.index_pools[4].index_k_with_scale_buffer,
        "deepseek_v4_c4_state": rows(pool.compress_state_pools),
        "deepseek_v4_c4_indexer_state": rows(pool.indexer_compress_state_pools),
    }


def _request(number: int, prompt: list[int]) -> Req:
    return Req(
        rid=str(number),
        origin_input_text="",
        origin_input_ids=array("q", prompt),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1000),
    )


@contextmanager
def _captured(runner: ModelRunner) -> Iterator[list[torch.Tensor]]:
    """Collect the outputs of the model's body while in context."""
    body, outputs = runner.model.model, []
    original = body.forward

    def forward(*args: object, **kwargs: object) -> object:
        output = original(*args, **kwargs)
        outputs.append(output[0].clone())
        return output

    body.forward = forward
    try:
        yield outputs
    finally:
        del body.forward


def main() -> None:
    checkpoint, jobs, results, dtype = sys.argv[1:]
    runner = load(checkpoint, dtype)
    torch.save([run(runner, prompts, steps) for prompts, steps in torch.load(jobs)], results)


if __name__ == "__main__":
    main()
