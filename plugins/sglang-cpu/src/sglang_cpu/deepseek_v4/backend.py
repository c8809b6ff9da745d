# SPDX-License-Identifier: MIT
"""The `dsv4` attention backend in torch, over the real device pools. It keeps nothing from batch to batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_cpu.deepseek_v4 import codecs, indexer
from sglang_cpu.deepseek_v4.attention import WINDOW_TOKENS, attend
from sglang_cpu.deepseek_v4.compressor import Compression
from sglang_cpu.deepseek_v4.numerics import hadamard, rms_norm, rotate_tail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.layers.attention.dsv4.compressor import Compressor
    from sglang.srt.layers.attention.dsv4.indexer import C4Indexer
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

INDEX_RATIO = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one request in a batch.

    Attributes:
        request: The request's row in SGLang's request-to-token table.
        rows: The tokens' rows in the batch.
        start: Position of the first token.
        end: Position after the last token.
    """

    request: int
    rows: slice
    start: int
    end: int


def segments(batch: ForwardBatch) -> list[Segment]:
    """Split a batch into its requests, in order."""
    mode = batch.forward_mode
    if mode.is_decode():
        lengths = [1] * batch.batch_size
    elif mode.is_target_verify() or mode.is_draft_extend_v2():
        lengths = [batch.positions.shape[0] // batch.batch_size] * batch.batch_size
    else:
        lengths = list(batch.extend_seq_lens_cpu)
    result = []
    first = 0
    for request, length in zip(batch.req_pool_indices.tolist(), lengths, strict=True):
        if length:
            start = int(batch.positions[first])
            result.append(Segment(request, slice(first, first + length), start, start + length))
        first += length
    return result


class TorchDeepseekV4Backend(AttentionBackend):  # type: ignore[misc] # SGLang is untyped here.
    """Serves target and draft layers, in every forward mode."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self._request_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool: DeepSeekV4TokenToKVPool = model_runner.token_to_kv_pool
        self._index_top_k: int = getattr(model_runner.model_config.hf_text_config, "index_topk", 0)
        self._selected: list[torch.Tensor] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Do nothing: everything is derived from the batch when it is needed."""

    def get_swa_out_cache_loc(self, forward_batch: ForwardBatch) -> torch.Tensor:
        """Return where the sliding-window rows of a batch's tokens go."""
        return self.token_to_kv_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc).to(
            torch.int32
        )

    def forward_core_compressor(
        self, x: torch.Tensor, forward_batch: ForwardBatch, layer_id: int, compressor: Compressor
    ) -> None:
        """Compress a batch's tokens into the layer's KV entries."""
        pool = self.token_to_kv_pool
        pages, page_size = pool.get_extra_key_buffer(layer_id), pool.get_extra_key_page_size(layer_id)
        for entries, slots in self._compress(x, forward_batch, compressor):
            codecs.store_kv(pages, slots, entries, page_size)

    def forward_indexer_compressor(
        self, x: torch.Tensor, forward_batch: ForwardBatch, layer_id: int, compressor: Compressor
    ) -> None:
        """Compress a batch's tokens into the layer's index keys."""
        pool = self.token_to_kv_pool
        pages, page_size = (
            pool.get_index_k_with_scale_buffer(layer_id),
            pool.get_index_k_page_size(INDEX_RATIO),
        )
        for entries, slots in self._compress(x, forward_batch, compressor):
            codecs.store_index(pages, slots, hadamard(entries), page_size)

    def forward_c4_indexer(
        self,
        x: torch.Tensor,
        q_lora: torch.Tensor,
        c4_indexer: C4Indexer,
        forward_batch: ForwardBatch,
        **_: object,
    ) -> None:
        """Store the layer's index keys and choose the entries that its attention will read next."""
        query, weights = c4_indexer.compute_q(
            q_lora, forward_batch.positions, c4_indexer.compute_weights(x, True)
        )
        self.forward_indexer_compressor(x, forward_batch, c4_indexer.layer_id, c4_indexer.compressor)
        pool = self.token_to_kv_pool
        pages = pool.get_index_k_with_scale_buffer(c4_indexer.layer_id)
        page_size = pool.get_index_k_page_size(INDEX_RATIO)
        self._selected = []
        for segment in segments(forward_batch):
            keys, scales = codecs.load_index(pages, self._entry_slots(segment, INDEX_RATIO), page_size)
            entries = torch.arange(segment.start + 1, segment.end + 1) // INDEX_RATIO
            rows = segment.rows
            self._selected.append(
                indexer.select(query[rows], weights[rows], keys, scales, entries, self._index_top_k)
            )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        compress_ratio: int,
        attn_sink: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        """Attend from `q` `[tokens, heads, 512]`. The tokens' own rows are in the pools already.

        With tensor parallelism SGLang pads the heads; the result has this rank's only.
        """
        del k, v, save_kv_cache
        heads = layer.tp_q_head_num
        q, attn_sink = q[:, :heads], attn_sink[:heads]
        output = torch.empty_like(q)
        for number, segment in enumerate(segments(forward_batch)):
            compressed = self._compressed(layer.layer_id, segment, compress_ratio)
            visible = (
                self._selected[number]
                if compress_ratio == INDEX_RATIO
                else _all_closed(segment, compress_ratio)
            )
            output[segment.rows] = attend(
                q[segment.rows],
                self._window(layer.layer_id, segment),
                compressed,
                visible,
                attn_sink,
                layer.scaling,
            )
        return output

    def _window(self, layer_id: int, segment: Segment) -> torch.Tensor:
        pool = self.token_to_kv_pool
        first = max(0, segment.start - WINDOW_TOKENS + 1)
        tokens = self._request_to_token[segment.request, first : segment.end].long()
        slots = pool.translate_loc_from_full_to_swa(tokens)
        return codecs.load_kv(pool.get_swa_key_buffer_radix(layer_id), slots, pool.swa_page_size)

    def _compressed(self, layer_id: int, segment: Segment, ratio: int) -> torch.Tensor:
        if ratio == 0:
            return torch.empty(0, codecs.NOPE_DIM + codecs.ROPE_DIM, dtype=torch.float64)
        pool = self.token_to_kv_pool
        page_size = pool.get_extra_key_page_size(layer_id)
        return codecs.load_kv(
            pool.get_extra_key_buffer(layer_id), self._entry_slots(segment, ratio), page_size
        )

    def _entry_slots(self, segment: Segment, ratio: int) -> torch.Tensor:
        """Return where the request's compressed entries are: beside the last token of each."""
        return self._request_to_token[segment.request, ratio - 1 : segment.end : ratio].long() // ratio

    def _compress(
        self, x: torch.Tensor, forward_batch: ForwardBatch, compressor: Compressor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each request's new entries, normalised and rotated, with their slots; update its ring."""
        shape = Compression(compressor.ratio, compressor.head_dim)
        states = compressor.get_state_pool(self)
        ring = states.kv_score_buffer.kv_score
        rows = compressor.compute_kv_score(x, forward_batch)
        bias = compressor.ape.view(-1, compressor.head_dim)
        for segment in segments(forward_batch):
            own = rows[segment.rows]
            closing = shape.closing_positions(segment.start, segment.end)
            if len(closing):
                first = segment.start - shape.carried_tokens(segment.start)
                carried = ring[self._ring_rows(states, segment.request, first, segment.start)]
                entries = shape.pool(torch.cat([carried, own]), first, bias, closing)
                entries = rms_norm(entries, compressor.norm.weight, compressor.norm.variance_epsilon)
                entries = rotate_tail(entries, compressor.freqs_cis[closing + 1 - shape.ratio])
                yield entries, self._request_to_token[segment.request, closing].long() // shape.ratio
            page_size = self.token_to_kv_pool.swa_page_size
            kept = shape.written_to_ring(segment.start, segment.end, states.ring_size, page_size)
            targets = self._ring_rows(states, segment.request, segment.start, segment.end)
            ring[targets[kept]] = own[kept]

    def _ring_rows(self, states: CompressStatePool, request: int, start: int, end: int) -> torch.Tensor:
        """Return the ring rows of tokens. A ring belongs to a page or, at 128:1, to the request."""
        if states.ratio != INDEX_RATIO:
            return request * states.ring_size + torch.arange(start, end) % states.ring_size
        tokens = self._request_to_token[request, start:end].long()
        slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(tokens)
        return states.translate_from_swa_loc_to_state_loc(slots)


class TorchDeepseekV4DraftBackend:
    """One backend per draft step, as SGLang's EAGLE worker expects; they can all be the same one."""

    def __init__(self, model_runner: ModelRunner, topk: int, speculative_num_steps: int) -> None:
        del topk
        self.attn_backends = [TorchDeepseekV4Backend(model_runner)] * speculative_num_steps

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Do nothing, as the backends of the steps do."""


def _all_closed(segment: Segment, ratio: int) -> torch.Tensor:
    if ratio == 0:
        return torch.empty(segment.end - segment.start, 0, dtype=torch.bool)
    entries = torch.arange(segment.start + 1, segment.end + 1) // ratio
    return torch.arange(segment.end // ratio) < entries.unsqueeze(1)
