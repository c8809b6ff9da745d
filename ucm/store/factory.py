# SPDX-License-Identifier: MIT
"""From a user's settings to an open store; understands upstream UCM's names."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.store.errors import StoreConfigError, StoreUnavailableError
from ucm.store.identity import check_or_write_identity
from ucm.store.interface import KVStore, StoreSpec
from ucm.store.native.config import PIPELINE_CONNECTOR, NativeStoreConfig
from ucm.store.options import as_mapping, as_text, reject_unknown
from ucm.store.posix.config import OPTION_NAMES, PosixStoreConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

CONNECTOR_KEYS = ("ucm_connector_name", "ucm_connector_module_path", "ucm_connector_config")
DEFAULT_CONNECTOR = "UcmPosixStore"
EMBEDDED, NATIVE = "embedded", "native"

# Upstream's stores that keep plain files below `storage_backends`, and the modules it has them in.
_POSIX_CONNECTORS = frozenset({DEFAULT_CONNECTOR, "UcmPipelineStore", "UcmNfsStore", "UcmPcStore"})
_POSIX_MODULES = frozenset(
    {
        "ucm.store.pipeline.connector",
        "ucm.store.pcstore.pcstore_connector",
        "ucm.store.pcstore.pcstore_connector_v1",
        "ucm.store.nfsstore.nfsstore_connector",
    }
)
# Upstream's SGLang connector turns every pipeline into "Posix"; the two that end in it mean the same files.
_POSIX_PIPELINES = frozenset({"Posix", "Cache|Posix"})

# Settings of upstream's stores that have no meaning here: sizes come from the pool, and the rest
# tunes threads, buffers and garbage collection of theirs; ours is `capacity_bytes`.
_IGNORED_UPSTREAM_OPTIONS = frozenset(
    {
        "block_size",
        "buffer_number",
        "cache_buffer_capacity_gb",
        "cpu_affinity_cores",
        "data_dir_shard_bytes",
        "device",
        "device_id",
        "gpu_kv_buffer_addrs",
        "gpu_kv_buffer_sizes",
        "io_direct",
        "io_size",
        "kv_block_size",
        "local_rank_size",
        "max_cache_size",
        "posix_capacity_gb",
        "posix_commit_concurrency",
        "posix_data_trans_concurrency",
        "posix_gc_candidate_extra_percent",
        "posix_gc_check_interval_sec",
        "posix_gc_concurrency",
        "posix_gc_cross_instance_lock",
        "posix_gc_enable",
        "posix_gc_heartbeat_interval_sec",
        "posix_gc_max_recycle_count_per_shard",
        "posix_gc_precise_mode",
        "posix_gc_recycle_percent",
        "posix_gc_shard_sample_ratio",
        "posix_gc_stale_threshold_sec",
        "posix_gc_task_timeout_ms",
        "posix_gc_trigger_threshold_ratio",
        "posix_io_engine",
        "posix_lookup_concurrency",
        "posix_open_concurrency",
        "recycle_enable",
        "recycle_threshold_ratio",
        "role",
        "running_queue_depth",
        "shard_size",
        "share_buffer_enable",
        "storage_capacity",
        "store_health",
        "stream_number",
        "tensor_size",
        "tensor_size_list",
        "timeout_ms",
        "unique_id",
        "use_direct",
        "use_gdr",
        "use_scatter_gatter",
        "waiting_queue_depth",
    }
)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Which store to open, and its options.

    Args:
        connector_name: Class or factory name as the user gave it.
        options: Parsed options of the embedded or a native store, or whatever a store
            from `module_path` is to be given.
        module_path: Module that provides `connector_name`; None for those two.
    """

    connector_name: str
    options: PosixStoreConfig | NativeStoreConfig | Mapping[str, object]
    module_path: str | None = None

    @classmethod
    def from_mapping(cls, raw: Mapping[str, object]) -> StoreConfig:
        """Parse `{"storage_backends": ...}` or upstream's nested form.

        The nested form has `ucm_connector_name`, `ucm_connector_module_path` and
        `ucm_connector_config`, the last holding the options. Without
        `ucm_connector_config`, every other key is an option.

        Raises:
            StoreConfigError: A key is unknown or missing, or a value is wrong.
        """
        if "ucm_connector_config" in raw:
            reject_unknown(raw, CONNECTOR_KEYS, "key beside 'ucm_connector_config'")
            options = as_mapping("ucm_connector_config", raw["ucm_connector_config"])
        else:
            options = {key: value for key, value in raw.items() if key not in CONNECTOR_KEYS}
        name = as_text("ucm_connector_name", raw.get("ucm_connector_name", DEFAULT_CONNECTOR))
        module_path = raw.get("ucm_connector_module_path")
        engine = options.get("engine", EMBEDDED)
        if engine not in (EMBEDDED, NATIVE):
            raise StoreConfigError(f"option 'engine' is {engine!r}; expected {EMBEDDED!r} or {NATIVE!r}")
        options = {key: value for key, value in options.items() if key != "engine"}
        if engine == NATIVE:
            name = PIPELINE_CONNECTOR if name == DEFAULT_CONNECTOR else name
            path = as_text("ucm_connector_module_path", module_path) if module_path else None
            return cls(name, NativeStoreConfig.from_mapping(name, path, options))
        if module_path and module_path not in _POSIX_MODULES:
            return cls(name, options, as_text("ucm_connector_module_path", module_path))
        if name not in _POSIX_CONNECTORS:
            raise StoreConfigError(
                f"option 'ucm_connector_name' is {name!r}; expected one of {sorted(_POSIX_CONNECTORS)}, "
                "or set 'ucm_connector_module_path' to the module that provides it, "
                "or 'engine' to 'native' for a store of UCM's own package"
            )
        return cls(name, PosixStoreConfig.from_mapping(_without_upstream_options(options)))

    @property
    def storage_roots(self) -> tuple[str, ...]:
        """The directories this store keeps its files in; empty if it keeps none that we know of."""
        if isinstance(self.options, (PosixStoreConfig, NativeStoreConfig)):
            return self.options.storage_backends
        return ()


def open_store(spec: StoreSpec, config: StoreConfig) -> KVStore:
    """Open the store that `config` describes for blocks of `spec`.

    Raises:
        StoreConfigError: The store cannot be found or refuses its options.
        StoreUnavailableError: Its storage cannot be used.
    """
    if isinstance(config.options, PosixStoreConfig):
        from ucm.store.posix.store import PosixStore  # Only now: other stores need none of it.

        return PosixStore(spec, config.options)
    if isinstance(config.options, NativeStoreConfig):
        from ucm.store.native.store import open_native_store  # As above.

        return open_native_store(spec, config.options)
    store = _custom_opener(config)(spec, config.options)
    if not isinstance(store, KVStore):
        raise StoreConfigError(
            f"{config.module_path}.{config.connector_name} gave a {type(store).__name__}; expected a KVStore"
        )
    return store


def claim_identity(config: StoreConfig, record_name: str, record: Mapping[str, object]) -> None:
    """Refuse to share a directory with blocks of another shape or meaning.

    The first caller leaves `record` under every storage root; later ones must
    bring an equal one. Stores without local directories accept everything.

    Args:
        config: The store that will hold the blocks.
        record_name: What the record is about: the same text for everyone whose
            block keys could be equal (namespace, model and shard suffix).
        record: JSON values: dtype, layout, page size, components, versions.

    Raises:
        StoreConfigError: A different record exists; names its path, the field and both values.
        StoreUnavailableError: A root cannot be read or written, or does not answer.
    """
    roots, options = config.storage_roots, config.options
    if not roots or not isinstance(options, (PosixStoreConfig, NativeStoreConfig)):
        return
    from ucm.store.posix.engine import run_alone  # Only now: other stores need none of it.

    timeout_s = (options if isinstance(options, PosixStoreConfig) else options.own).dump_timeout_s
    if not run_alone(lambda: check_or_write_identity(roots, record_name, record), timeout_s):
        raise StoreUnavailableError(
            f"cannot read the identity records below {' or '.join(roots)}: no answer within {timeout_s:g} s"
        )


def _without_upstream_options(options: Mapping[str, object]) -> dict[str, object]:
    ours = dict(options)
    pipeline = ours.pop("store_pipeline", "Posix")
    if pipeline not in _POSIX_PIPELINES:
        raise StoreConfigError(
            f"option 'store_pipeline' is {pipeline!r}; expected one of {sorted(_POSIX_PIPELINES)}, "
            "or option 'engine' set to 'native' for a pipeline of UCM's own package"
        )
    ignored = sorted(_IGNORED_UPSTREAM_OPTIONS & ours.keys())
    if ignored:
        logger.warning("these upstream store options have no effect here: %s", ", ".join(ignored))
    return {key: value for key, value in ours.items() if key not in ignored}


def _custom_opener(config: StoreConfig) -> Callable[[StoreSpec, Mapping[str, object]], object]:
    module_path = str(config.module_path)
    try:
        module = importlib.import_module(module_path)
    except ImportError as exc:
        raise StoreConfigError(
            f"option 'ucm_connector_module_path' is {module_path!r}; expected an importable module: {exc}"
        ) from exc
    opener = getattr(module, config.connector_name, None)
    if not callable(opener):
        raise StoreConfigError(
            f"option 'ucm_connector_name' is {config.connector_name!r}; expected a KVStore class "
            f"or a function taking (StoreSpec, options) in module {module_path!r}"
        )
    return opener  # type: ignore[no-any-return]  # Called with its documented arguments; the result is checked.


__all__ = [
    "CONNECTOR_KEYS",
    "DEFAULT_CONNECTOR",
    "OPTION_NAMES",
    "StoreConfig",
    "claim_identity",
    "open_store",
]
