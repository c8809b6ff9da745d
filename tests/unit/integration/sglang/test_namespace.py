# SPDX-License-Identifier: MIT
from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ucm.integration.sglang.namespace import (
    CacheNamespace,
    PoolOwnership,
    RankShard,
    ServedModel,
    block_keys,
)

TP2 = RankShard(tp_rank=1, tp_size=2)


def namespace(
    *,
    name: str = "Qwen3",
    shard: RankShard = TP2,
    model_replicated: bool = False,
    pool: str = "kv",
    primary: bool = True,
    replicated: bool | None = None,
    dtype: str = "bfloat16",
    layout: str = "page_first",
    page_tokens: int = 64,
    segment_bytes: tuple[int, ...] = (4096, 4096),
) -> CacheNamespace:
    return CacheNamespace(
        model=ServedModel(name=name, shard=shard, replicated=model_replicated),
        pool=pool,
        primary=primary,
        ownership=PoolOwnership(
            shard=shard, replicated=model_replicated if replicated is None else replicated
        ),
        dtype=dtype,
        layout=layout,
        page_tokens=page_tokens,
        segment_bytes=segment_bytes,
        component_bytes=(sum(segment_bytes),) if pool == "mamba" else segment_bytes,
    )


def key_text(namespace: CacheNamespace, page_hash: str = "abc") -> str:
    return page_hash + namespace.key_suffix


# Golden: caches written by earlier releases keep their names.
@pytest.mark.parametrize(
    ("namespace", "text"),
    [
        (namespace(), "abc_Qwen3_1_2"),
        (namespace(model_replicated=True), "abc_Qwen3"),
        (namespace(pool="swa", primary=False), "abc_Qwen3_1_2__v2_tp_1_2__pool_swa__component_0"),
        (
            namespace(pool="indexer", primary=False, model_replicated=True),
            "abc_Qwen3__v2_tp_0_2__pool_indexer__component_0",
        ),
        (
            namespace(pool="mamba", primary=False, model_replicated=True, replicated=False),
            "abc_Qwen3__v2_tp_1_2__pool_mamba__component_0",
        ),
    ],
)
def test_the_key_text_of_the_plain_case_is_golden(namespace: CacheNamespace, text: str) -> None:
    assert key_text(namespace) == text


def test_a_block_key_is_the_md5_of_its_text() -> None:
    assert block_keys(["abc"], "_Qwen3_1_2") == [hashlib.md5(b"abc_Qwen3_1_2").digest()]  # noqa: S324 -- A name.


# sglang #17193: keys are opaque.
@pytest.mark.parametrize("page_hash", ["a" * 64, "f" * 16, "鍵é\N{GRINNING FACE}", "x" * 2000, ""])
def test_any_text_is_a_page_hash(page_hash: str) -> None:
    (key,) = block_keys([page_hash], "_m_0_1")

    assert len(key) == 16


@pytest.mark.parametrize(
    ("namespace", "directory"),
    [
        (namespace(), ""),
        (namespace(pool="swa", primary=False), "sglang_v2/swa_4096x2"),
        (namespace(pool="mamba", primary=False, segment_bytes=(900, 90, 9)), "sglang_v2/mamba_999x1"),
    ],
)
def test_a_sidecar_has_a_directory_of_its_own(namespace: CacheNamespace, directory: str) -> None:
    assert namespace.directory == directory


def test_models_that_differ_in_a_slash_do_not_collide() -> None:
    names = ["org/a-b", "org-a/b", "org-a-b", "org/a/b"]

    assert len({key_text(namespace(name=name)) for name in names}) == 4


# sglang #15175, #37149, #26670
@pytest.mark.parametrize(
    ("shard", "suffix"),
    [
        (replace(TP2, pp_rank=1, pp_size=2), "_pp1_2"),
        (replace(TP2, cp_rank=3, cp_size=4), "_cp3_4"),
        (RankShard(tp_rank=1, tp_size=2, dcp_rank=1, dcp_size=2), "_dcp1_2"),
    ],
)
def test_ranks_that_split_layers_or_tokens_are_in_every_key(shard: RankShard, suffix: str) -> None:
    assert suffix in key_text(namespace(shard=shard))
    assert suffix in key_text(namespace(shard=shard, model_replicated=True))
    assert suffix in key_text(namespace(shard=shard, pool="swa", primary=False))


def test_a_replicated_pool_has_one_key_whichever_rank_asks() -> None:
    shards = [RankShard(tp_rank=rank, tp_size=8) for rank in range(8)]
    texts = {key_text(namespace(shard=s, model_replicated=True, pool="c4", primary=False)) for s in shards}

    assert len(texts) == 1


def test_ranks_of_one_dcp_shard_share_their_key() -> None:
    shards = [RankShard(tp_rank=rank, tp_size=4, dcp_rank=rank % 2, dcp_size=2) for rank in range(4)]
    texts = [key_text(namespace(shard=s, model_replicated=True, pool="c4", primary=False)) for s in shards]

    assert texts[0] == texts[2]
    assert texts[1] == texts[3]
    assert texts[0] != texts[1]


def test_a_rank_outside_its_group_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"pp_rank must be in \[0, 2\), got 2"):
        RankShard(pp_rank=2, pp_size=2)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "fp8_e4m3"},
        {"layout": "page_first_direct"},
        {"page_tokens": 128},
        {"segment_bytes": (8192,)},
        {"pool": "swa"},
        {"name": "Qwen3-Next"},
    ],
)
def test_the_identity_changes_with_the_meaning_of_the_bytes(change: dict[str, object]) -> None:
    assert namespace(**change).identity_digest != namespace().identity_digest  # type: ignore[arg-type]  # One field.


def test_the_identity_is_the_same_on_every_rank() -> None:
    other = RankShard(tp_rank=0, tp_size=2)

    assert namespace(shard=other).identity_digest == namespace().identity_digest


SIZES = st.integers(1, 3)


@st.composite
def servers(draw: st.DrawFn) -> list[RankShard]:
    """All ranks of one server; DCP divides the ranks of a TP group in turn."""
    pp_size, cp_size, dcp_size = draw(SIZES), draw(SIZES), draw(SIZES)
    tp_size = dcp_size * draw(SIZES)
    return [
        RankShard(
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
            cp_rank=cp_rank,
            cp_size=cp_size,
            dcp_rank=tp_rank % dcp_size,
            dcp_size=dcp_size,
        )
        for pp_rank in range(pp_size)
        for cp_rank in range(cp_size)
        for tp_rank in range(tp_size)
    ]


SHARDS = servers().flatmap(st.sampled_from)


def held_part(shard: RankShard, *, replicated: bool) -> tuple[object, ...]:
    """What a rank holds of a pool: layers, tokens, and its share of them unless all TP ranks hold alike."""
    share = () if replicated else (shard.tp_rank, shard.tp_size)
    layers, tokens = (shard.pp_rank, shard.pp_size), (shard.cp_rank, shard.cp_size)
    return (*layers, *tokens, shard.dcp_rank, shard.dcp_size, *share)


MODELS = st.sampled_from(["m", "m_0_2", "m_0", "a/b", "a-b", "m__pool_swa", "m_pp0_2"])
POOLS = st.sampled_from(["kv", "swa", "mamba", "deepseek_v4_c4", "deepseek_v4_c4_state"])


@st.composite
def kinds(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of `namespace` that say which pool of which kind of model it is."""
    model_replicated, primary = draw(st.booleans()), draw(st.booleans())
    return {
        "model_replicated": model_replicated,
        "replicated": model_replicated and (primary or draw(st.booleans())),
        "primary": primary,
        "pool": "kv" if primary else draw(POOLS),
    }


@given(ranks=servers(), kind=kinds())
def test_ranks_of_a_server_share_a_key_exactly_when_they_hold_the_same_bytes(
    ranks: list[RankShard], kind: dict[str, Any]
) -> None:
    texts = [key_text(namespace(shard=shard, **kind)) for shard in ranks]
    parts = [held_part(shard, replicated=kind["replicated"]) for shard in ranks]

    assert len(set(texts)) == len(set(parts)) == len(set(zip(texts, parts, strict=True)))


@given(first=SHARDS, second=SHARDS, kind=kinds())
def test_ranks_of_two_servers_share_a_key_only_when_they_hold_the_same_bytes(
    first: RankShard, second: RankShard, kind: dict[str, Any]
) -> None:
    texts = [key_text(namespace(shard=shard, **kind)) for shard in (first, second)]
    parts = [held_part(shard, replicated=kind["replicated"]) for shard in (first, second)]

    assert texts[0] != texts[1] or parts[0] == parts[1]


@given(ranks=servers(), replicated=st.booleans())
def test_exactly_one_of_the_ranks_that_hold_the_same_bytes_writes_them(
    ranks: list[RankShard], replicated: bool
) -> None:
    writers = [
        held_part(shard, replicated=replicated)
        for shard in ranks
        if PoolOwnership(shard=shard, replicated=replicated).writes
    ]

    assert sorted(writers) == sorted({held_part(shard, replicated=replicated) for shard in ranks})


HASHES = st.text(alphabet="0123456789abcdef", min_size=1, max_size=8)


@given(
    hashes=st.tuples(HASHES, HASHES),
    names=st.tuples(MODELS, MODELS),
    ranks=st.tuples(SHARDS, SHARDS),
    replicated=st.booleans(),
    pools=st.tuples(POOLS, POOLS),
    primary=st.booleans(),
)
def test_different_pages_differ_in_key_or_identity(
    hashes: tuple[str, str],
    names: tuple[str, str],
    ranks: tuple[RankShard, RankShard],
    replicated: bool,
    pools: tuple[str, str],
    primary: bool,
) -> None:
    assume(hashes[0] != hashes[1] or names[0] != names[1] or pools[0] != pools[1])
    places = [
        namespace(name=name, shard=shard, model_replicated=replicated, pool=pool, primary=primary)
        for name, shard, pool in zip(names, ranks, pools, strict=True)
    ]
    blocks = [
        (key_text(place, page), place.identity_digest) for place, page in zip(places, hashes, strict=True)
    ]
    assert blocks[0] != blocks[1]
