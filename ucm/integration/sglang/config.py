# SPDX-License-Identifier: MIT
"""The user's settings, parsed once.

They come as SGLang's `--hicache-storage-backend-extra-config`, either flat
(`{"storage_backends": "/mnt/a"}`) or in upstream UCM's nested form, or from the
YAML file that `UNIFIEDCACHE_CONFIG_FILE` names, in either form.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ucm.store.errors import StoreConfigError
from ucm.store.factory import StoreConfig
from ucm.store.options import as_mapping

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_FILE_VARIABLE = "UNIFIEDCACHE_CONFIG_FILE"
NESTED_KEY = "kv_connector_extra_config"

SGLANG_KEYS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
"""What SGLang itself reads from the extra config, and may leave in it."""

_EXAMPLE = """--hicache-storage-backend-extra-config '{"storage_backends": "/mnt/kv-cache"}'"""


@dataclass(frozen=True, slots=True)
class UnifiedCacheConfig:
    """All user settings of the backend.

    Args:
        store: Which store to open for each pool, and its options.
    """

    store: StoreConfig

    @classmethod
    def from_extra_config(
        cls, extra_config: Mapping[str, object] | None, environ: Mapping[str, str]
    ) -> UnifiedCacheConfig:
        """Parse the extra config, or the YAML file where it says nothing about storage.

        Args:
            extra_config: SGLang's `HiCacheStorageConfig.extra_config`; not changed.
            environ: The process environment.

        Raises:
            StoreConfigError: No storage is configured, a file cannot be read, a
                key is unknown, or a value is wrong.
        """
        settings = _own_settings(extra_config or {})
        config_file = environ.get(CONFIG_FILE_VARIABLE)
        if not settings and config_file:
            settings = _own_settings(_read_yaml(config_file))
        if not settings:
            raise StoreConfigError(
                f"no storage is configured; pass {_EXAMPLE}, "
                f"or set {CONFIG_FILE_VARIABLE} to a YAML file with 'storage_backends: /mnt/kv-cache' in it"
            )
        if NESTED_KEY in settings:
            stray = sorted(settings.keys() - {NESTED_KEY})
            if stray:
                raise StoreConfigError(
                    f"key {stray[0]!r} is {settings[stray[0]]!r} beside {NESTED_KEY!r}; "
                    "expected store options in its 'ucm_connector_config' only"
                )
            settings = as_mapping(NESTED_KEY, settings[NESTED_KEY])
        return cls(store=StoreConfig.from_mapping(settings))


def _own_settings(raw: Mapping[str, object]) -> Mapping[str, object]:
    return {key: value for key, value in raw.items() if key not in SGLANG_KEYS}


def _read_yaml(config_file: str) -> Mapping[str, object]:
    try:
        document = yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise StoreConfigError(
            f"{CONFIG_FILE_VARIABLE} is {config_file!r}; expected a readable YAML file: {exc}"
        ) from exc
    return as_mapping(f"the document in {config_file}", document)
