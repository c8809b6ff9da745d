# SPDX-License-Identifier: MIT
"""What one SGLang release asks of a storage backend, and gives it, as text: one fact a line.

Read from source with `ast`, so that no release has to be imported. Two of these texts, compared line by line,
are what a new release changes.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Iterator
    from pathlib import Path

STORAGE = "srt/mem_cache/hicache_storage.py"
CONTROLLERS = (
    "srt/managers/cache_controller.py",
    "srt/mem_cache/hybrid_cache/hybrid_cache_controller.py",
)
FACTORY = "srt/mem_cache/storage/backend_factory.py"
HOST_POOLS = "srt/mem_cache"

_CONTROLLER_METHODS = {
    "attach_storage_backend",
    "backup_thread_func",
    "detach_storage_backend",
    "prefetch",
    "prefetch_io_aux_func",
    "prefetch_thread_func",
    "should_backup",
    "write_storage",
}
_POOL_METHODS = {
    "__init__",
    "get_data_page",
    "get_dummy_flat_data_page",
    "get_page_buffer_meta",
    "get_size_per_token",
    "set_from_flat_data_page",
}


def contract(version: str, package: Path | zipfile.Path) -> str:
    """Describe the storage contract of the `sglang` package at `package`, in Markdown."""
    sections = {
        "types and interface": _interface(package),
        "controllers": _controllers(package),
        "calls of the backend": _calls(package),
        "host pools": _host_pools(package),
        "names of backends": _backend_names(package),
    }
    parts = [f"# What SGLang {version} asks of a storage backend\n"]
    for title, lines in sections.items():
        # Indented, which Markdown leaves as it is.
        parts.append(f"\n## {title}\n\n" + "".join(f"    {line}\n" for line in lines))
    return "".join(parts)


def _interface(package: Path | zipfile.Path) -> Iterator[str]:
    for cls in _classes(package, STORAGE):
        if cls.name == "HiCacheFile":
            continue  # A backend like ours.
        yield f"class {cls.name}({', '.join(map(ast.unparse, cls.bases))})"
        for node in cls.body:
            if isinstance(node, ast.AnnAssign | ast.Assign):
                yield f"  {ast.unparse(node)}"
            elif isinstance(node, ast.FunctionDef):
                yield f"  {_signature(node)}"


def _controllers(package: Path | zipfile.Path) -> Iterator[str]:
    for path in CONTROLLERS:
        for cls in _classes(package, path):
            for node in cls.body:
                if isinstance(node, ast.FunctionDef) and node.name in _CONTROLLER_METHODS:
                    guarded = any(
                        isinstance(each, ast.ExceptHandler) and getattr(each.type, "id", "") == "Exception"
                        for each in ast.walk(node)
                    )
                    yield f"{cls.name}.{_signature(node)}{'  [catches Exception]' if guarded else ''}"


def _calls(package: Path | zipfile.Path) -> Iterator[str]:
    for path in CONTROLLERS:
        for cls in _classes(package, path):
            for function in cls.body:
                if isinstance(function, ast.FunctionDef):
                    for node in ast.walk(function):
                        target = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                        if target.startswith("self.storage_backend."):
                            yield f"{cls.name}.{function.name}: {ast.unparse(node)}"


def _host_pools(package: Path | zipfile.Path) -> Iterator[str]:
    lines = []
    for path in _python_files(package / HOST_POOLS):
        text = path.read_text(encoding="utf-8")
        if "get_page_buffer_meta" not in text and "set_from_flat_data_page" not in text:
            continue
        for cls in ast.walk(ast.parse(text)):
            if isinstance(cls, ast.ClassDef) and "Host" in cls.name:
                lines += [
                    f"{cls.name}.{_signature(node)}"
                    for node in cls.body
                    if isinstance(node, ast.FunctionDef) and node.name in _POOL_METHODS
                ]
    yield from sorted(lines)


def _backend_names(package: Path | zipfile.Path) -> Iterator[str]:
    """Yield each place that names Mooncake's backend: a named backend may have to be there as well."""
    for path in _python_files(package / "srt"):
        text = path.read_text(encoding="utf-8")
        if '"mooncake"' not in text or "storage_backend" not in text:
            continue
        lines = text.splitlines()
        where = str(path).partition("srt/")[2]
        for number, line in enumerate(lines):
            around = " ".join(lines[max(0, number - 6) : number + 7])
            if '"mooncake"' in line and ("storage" in around or "hf3fs" in around):
                yield f"{where}: {line.strip()}"


def _classes(package: Path | zipfile.Path, path: str) -> Iterator[ast.ClassDef]:
    file = package / path
    if file.is_file():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        yield from (node for node in tree.body if isinstance(node, ast.ClassDef))


def _python_files(directory: Path | zipfile.Path) -> Iterator[Path | zipfile.Path]:
    entries: list[Any] = list(directory.iterdir())
    for entry in sorted(entries, key=lambda each: str(each.name)):
        if entry.is_dir():
            yield from _python_files(entry)
        elif entry.name.endswith(".py"):
            yield entry


def _signature(function: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{function.name}({ast.unparse(function.args)}){returns}"
