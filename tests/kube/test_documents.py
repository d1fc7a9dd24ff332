"""YAML and JSON that people wrote."""

from __future__ import annotations

import pytest

from busbar.kube.documents import DocumentError, documents_of_yaml, value_of_json


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1e-4", 1e-4),
        ("a: 1E5", 1e5),
        ("a: -.5", -0.5),
        ("a: 10Gi", "10Gi"),
        ("a: 1.2.3", "1.2.3"),
        ("a: 2024-01-01", "2024-01-01"),
        ("\ufeffa: 1\r\n", 1),
        ("a: &x {b: 1}\n---\na: 2", {"b": 1}),
    ],
)
def test_yaml_says_what_kubectl_reads_in_it(text: str, value: object) -> None:
    assert documents_of_yaml(text)[0]["a"] == value


def test_a_merged_name_may_be_set_again() -> None:
    text = "x: {base: &b {<<: &a {k: 1}, k: 2}}\nown: {<<: *b, k: 3}\nagain: *b"
    assert documents_of_yaml(text) == [{"x": {"base": {"k": 2}}, "own": {"k": 3}, "again": {"k": 2}}]
    with pytest.raises(DocumentError, match="aliases"):
        documents_of_yaml(text, aliases=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", "'a' is there twice in one object"),
        ("1: x\n'1': y", "'1' is there twice"),
        ("a: .nan", "what JSON cannot"),
        ("a: 1e400", "what JSON cannot"),
        ("a: !!binary aGk=", "what JSON cannot"),
        ("a: &a [*a]", "what JSON cannot"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: [", "expected"),
    ],
)
def test_yaml_that_would_be_lost_or_misread_is_refused(text: str, words: str) -> None:
    with pytest.raises(DocumentError, match=words):
        documents_of_yaml(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "'a' is there twice in one object"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": 1e999}', "1e999 is no number"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff", "utf-8"),
        ("9" * 5000, "integer"),
    ],
)
def test_json_that_would_be_lost_or_misread_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(DocumentError, match=words):
        value_of_json(text)
    assert value_of_json('{"a": [1.5, "a", {"a": null}]}') == {"a": [1.5, "a", {"a": None}]}
