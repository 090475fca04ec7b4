"""The page of the dashboard's API, from its OpenAPI description."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from generator.markdown import NOTE, cell, field_docs, table

from collab_dashboard import shapes
from collab_dashboard.metrics import METRICS
from collab_dashboard.server import make_app

KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true, false", "null": "null"}


def api_page() -> str:
    """Paths, then what they answer, then the metrics."""
    described = make_app([], is_local=True).openapi()
    lines = [
        "# The dashboard's API",
        NOTE,
        "",
        "What `collab dashboard` and `collab aux --dashboard` answer besides [the page](../how-to/watch-a-run.md).",
        described["info"]["description"],
        "The same for tools: `/api/openapi.json`.",
        "",
        "## Paths",
        "",
        *table(("`GET`", "answer", "what it is"), [_path(path, ways["get"]) for path, ways in _sorted(described)]),
        "",
        "## Shapes",
        "",
        "The WebSocket begins with a [Document](#document). Times are seconds since 1970.",
    ]
    known = described["components"]["schemas"] | _of_socket()
    for name in sorted(known):
        if hasattr(shapes, name):
            lines += ["", *_shape(name, known[name])]
    rows = [(f"`{name}`", kind, cell(what)) for name, kind, what, _ in METRICS]
    lines += [
        "",
        "## Metrics",
        "",
        "Each has the labels `run` (its name) and `run_id`.",
        "Only `collab_dashboard_clients` has none: it counts browsers.",
        "",
    ]
    lines += table(("name", "kind", "what it is"), rows)
    return "\n".join(lines) + "\n"


def _sorted(described: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from sorted(described["paths"].items())


def _of_socket() -> dict[str, Any]:
    schema = shapes.Document.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**schema.pop("$defs"), "Document": schema}


def _path(path: str, way: dict[str, Any]) -> tuple[str, str, str]:
    ((kind, content),) = way["responses"]["200"].get("content", {"": {}}).items()
    answer = _kind(content["schema"]) if kind == "application/json" else kind or "image/svg+xml"
    return f"`{path}`", answer, cell(way["description"])


def _shape(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    yield cell(getattr(shapes, name).__doc__)
    yield ""
    if "prefixItems" in schema:
        yield "A list of: " + ", ".join(f"`{_name(item)}` ({_kind(item)})" for item in schema["prefixItems"]) + "."
        return
    docs = field_docs(getattr(shapes, name))
    rows = [(f"`{key}`", _kind(value), cell(docs.get(key))) for key, value in schema["properties"].items()]
    yield from table(("field", "value", "what it is"), rows)


def _name(item: dict[str, Any]) -> str:
    return str(item["title"]).lower().replace(" ", "_")


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if words := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ", ".join(f"`{word}`" for word in words)
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    if schema["type"] == "object":
        return f"table of {_kind(schema['additionalProperties'])}"
    return KINDS[schema["type"]]
