"""CustomResourceDefinitions from the Pydantic models of `busbar.kube.types`.

Pydantic writes JSON Schema 2020-12; the API server wants a *structural* OpenAPI v3.0 schema: no references, no
nulls, boolean exclusive bounds, no rules on property names, and free-form maps marked as such. `structural` converts
the first into the second and refuses an unknown keyword, so nothing is lost silently. Rules on property names become
CEL rules.
"""

from __future__ import annotations

from typing import Any

import yaml

from busbar.kube.types import GROUP, KINDS, VERSION, Resource
from busbar.kube.types.meta import CATEGORY

Schema = dict[str, Any]

HEADER = "# Generated from busbar.kube.types by `python -m tools.generate`; do not edit.\n"
COPIED = (
    "description",
    "type",
    "format",
    "pattern",
    "enum",
    "default",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
    "x-kubernetes-validations",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
)
HANDLED = (
    "title",
    "properties",
    "items",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "x-kubernetes-int-or-string",
    "const",
    "discriminator",
)


class UnsupportedSchema(Exception):
    """A model uses a JSON Schema keyword that API servers do not support; express it as a bound or as a Rule."""


def structural(schema: Schema, definitions: dict[str, Schema], path: str = "") -> Schema:
    """The structural form of one JSON Schema node; `path` is for messages."""
    node = _resolved(schema, definitions)
    unknown = node.keys() - set(COPIED) - set(HANDLED)
    if unknown:
        raise UnsupportedSchema(f"{path or '<root>'}: cannot translate {', '.join(sorted(unknown))}")
    out: Schema = {key: node[key] for key in COPIED if key in node}
    if out.get("default", ...) is None:
        del out["default"]
    if "const" in node:
        out["enum"] = [node["const"]]
    for bound in ("Minimum", "Maximum"):
        if f"exclusive{bound}" in node:
            out[bound.lower()] = node[f"exclusive{bound}"]
            out[f"exclusive{bound}"] = True
    if node.get("x-kubernetes-int-or-string"):
        del out["type"]
        out |= {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    if "properties" in node:
        out["properties"] = {
            name: structural(child, definitions, f"{path}.{name}")
            for name, child in node["properties"].items()
        }
        if out.get("default") == {}:
            # The API server checks rules on a default before it adds the defaults of the nested fields.
            out["default"] = {
                name: child["default"] for name, child in out["properties"].items() if "default" in child
            }
    if "items" in node:
        out["items"] = structural(node["items"], definitions, f"{path}[]")
    _translate_map(node, out, definitions, path)
    return out


def _translate_map(node: Schema, out: Schema, definitions: dict[str, Schema], path: str) -> None:
    values = node.get("additionalProperties")
    patterns: dict[str, Schema] = node.get("patternProperties", {})
    if len(patterns) == 1:
        (values,) = patterns.values()
    if values is True:
        out["x-kubernetes-preserve-unknown-fields"] = True
    elif isinstance(values, dict):
        out["additionalProperties"] = structural(values, definitions, f"{path}.*")
    if patterns:
        (pattern,), longest = patterns, node["propertyNames"]["maxLength"]
        out["x-kubernetes-validations"] = [
            *out.get("x-kubernetes-validations", ()),
            {
                "rule": f"self.all(k, k.size() <= {longest} && k.matches({_cel_string(pattern)}))",
                "message": f"every key must have at most {longest} characters and match {pattern}",
            },
        ]


def _cel_string(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _resolved(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """The node without references and without `null`; keys beside a reference take precedence."""
    node = dict(schema)
    while True:
        if "$ref" in node:
            target = definitions[node.pop("$ref").rpartition("/")[2]]
            node = {**target, **node}
        elif "anyOf" in node:
            options = [option for option in node.pop("anyOf") if option.get("type") != "null"]
            if len(options) != 1:
                raise UnsupportedSchema(f"a union of {len(options)} types; make it one type and a Rule")
            node = {**options[0], **node}
        elif "allOf" in node:
            options = node.pop("allOf")
            if len(options) != 1:
                raise UnsupportedSchema("allOf with several parts")
            node = {**options[0], **node}
        else:
            return node


def crd(model: type[Resource]) -> Schema:
    """The CustomResourceDefinition of one kind."""
    info = model.info
    kind = model.__name__
    json_schema = model.model_json_schema(by_alias=True)
    definitions = json_schema.get("$defs", {})
    root: Schema = {
        "type": "object",
        "description": (model.__doc__ or "").strip(),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this schema: busbar.dev/v1alpha1."},
            "kind": {"type": "string", "description": f"Always {kind}."},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": structural(json_schema["properties"]["spec"], definitions, "spec"),
            "status": structural(json_schema["properties"]["status"], definitions, "status"),
        },
    }
    if model.rules:
        root["x-kubernetes-validations"] = [rule.to_schema() for rule in model.rules]
    subresources: Schema = {"status": {}}
    if info.scale is not None:
        subresources["scale"] = info.scale
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{info.plural}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "busbar-crds", "app.kubernetes.io/part-of": "busbar"},
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced" if info.namespaced else "Cluster",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": info.plural,
                "singular": info.singular,
                "shortNames": info.short_names,
                "categories": [CATEGORY],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": subresources,
                    "additionalPrinterColumns": [
                        {
                            "name": column.name,
                            "type": column.type,
                            "jsonPath": column.json_path,
                            "description": column.description,
                            "priority": column.priority,
                        }
                        for column in info.columns
                    ],
                    "schema": {"openAPIV3Schema": root},
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    """YAML without anchors, so that each file is readable by itself."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def to_yaml(document: Schema) -> str:
    """One document as YAML, in the order of its keys."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
    return text


def generate() -> dict[str, str]:
    """One file per kind in the chart of the CRDs."""
    files = {}
    for model in KINDS.values():
        document = crd(model)
        text = to_yaml(document)
        if "{{" in text:
            raise UnsupportedSchema(f"{model.__name__}: Helm would read {{{{ in this schema as a template")
        files[f"charts/busbar-crds/templates/{document['metadata']['name']}.yaml"] = HEADER + text
    return files
