"""Untrusted chat templates: rendering always ends soon, with a text or a `PolicyError`."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="jinja2 is not installed")

from mas_gym.errors import PolicyError
from mas_gym.policies.local.chat import MAX_CHARS, ChatTemplate

MESSAGES = [{"role": "system", "content": "You are the Solver."}, {"role": "user", "content": 'Is 3 < 4 & "5"?\n'}]
LOOP = "{% for i in range(99999) %}"
FOR_EVER = {
    "nested loops": LOOP * 3 + "{% endfor %}" * 3,
    "loops that skip": LOOP + "{% for j in range(99999) if false %}x{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{{ f(n-1) ~ f(n-1) if n }}{% endmacro %}{{ f(99) }}",
    "a recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "calls of a block": "{% macro f() %}{{ caller() }}{% endmacro %}"
    + LOOP * 2
    + "{% call f() %}{% endcall %}{% endfor %}{% endfor %}",
    "filters of long lists": "{% set r = range(99999)|list %}" + LOOP + "{{ r|map('string')|list|length }}{% endfor %}",
    "tests of long texts": "{% set r = 'a' * 4999999 %}" + LOOP + "{% if 'b' in r %}x{% endif %}{% endfor %}",
}
DOUBLE = "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set ns.x = ns.x %s ns.x %%}{%% endfor %%}"
FLOODS = {
    "a product": "{{ 'a' * 10**9 }}",
    "a product of lists": "{{ [1] * 10**9 }}",
    "a product from the right": "{{ 10**9 * 'a' }}",
    "a power": "{{ 10**10**10 }}{{ (10**10**3)**10**9 }}",
    "doubling by ~": DOUBLE % ("'ab'", "~"),
    "doubling by +": DOUBLE % ("'ab'", "+"),
    "doubling a number": DOUBLE % ("3", "*"),
    "a filter": "{{ 'a'|center(10**9) }}",
    "a filter by name": "{{ messages|map('center', 10**9)|list }}",
    "a batch": "{{ (1, 2)|batch(10**9, 'x')|list }}",
    "an indent": "{{ messages|tojson(indent=10**9) }}",
    "a method": "{{ 'a'.ljust(10**9) }}",
    "a format": "{{ '%1000000000d'|format(1) }}",
    "a format by %": "{{ '%1000000000d' % 1 }}",
    "a format method": "{{ '{:>1000000000}'.format(1) }}",
    "a nested format": "{{ '{:>{w}}'.format(1, w=10**9) }}",
    "a star format": "{{ '%*d' % (10**9, 1) }}",
    "a named star format": "{{ '%(w)*d'|format(w=10**9) }}",
    "replacements": "{{ ('x' * 9999)|replace('x', 'y' * 9999) }}",
    "a join": "{{ range(99999)|list|join('x' * 99999) }}",
    "output": LOOP + "{{ messages[0].content * 1000 }}{% endfor %}",
    "output of a block": "{% set x %}" + LOOP + "{{ messages[0].content * 1000 }}{% endfor %}{% endset %}",
    "its own text": LOOP + "x" * 9999 + "{% endfor %}",
    "its length": "x" * 2**21,
    "random words": "{{ lipsum(10**7) }}",
}
BROKEN = {
    "no syntax": "{% if %}",
    "an open block": "{% for m in messages %}",
    "an unknown tag": "{% do messages.append(1) %}",
    "an unknown filter": "{{ messages|pickle }}",
    "deep parentheses": "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "deep blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "deep lists": "{{" + "[" * 900 + "]" * 900 + "}}",
    "another file": "{% include 'x' %}",
    "a parent": "{% extends '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "nothing there": "{{ messages[7].a.b }}",
    "a division by 0": "{{ 1 / 0 }}",
    "a refusal": "{{ raise_exception('\x1b[2Jno') }}",
    "a class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ messages[0].content.__init__.__globals__ }}",
    "internals": "{{ raise_exception.__globals__.json }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a broken codec": "{{ 'x'.encode('utf-8').decode('punycode') }}",
    "numbers as text": "{{ 1 ~ none.x.y }}",
}
SOUND = [
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{{ bos_token }}{% for m in messages %}{% if loop.first and m['role'] == 'system' %}{{ m['content']|trim }}"
    "{% else %}[{{ loop.index0 }}/{{ loop.length }}{{ ', last' if loop.last }}] {{ m['content'] + eos_token }}"
    "{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m|tojson }}{% break %}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% macro show(m, n=2) %}{{ m.content[:n] ~ m.role ~ n }}{% endmacro %}"
    "{% for m in messages[::-1] %}{{ show(m) }}{% endfor %}",
    "{% macro wrap() %}<{{ caller() }}>{% endmacro %}{% call wrap() %}{{ messages|length }}{% endcall %}",
    "{% set ns = namespace(found=false) %}{% for m in messages if m.role != 'system' %}{% set ns.found = true %}"
    "{% else %}none{% endfor %}{{ ns.found }}{{ messages|map(attribute='role')|join(', ')|upper }}",
    "{%- set t = messages[0]['content'].split(' ') -%}\n  {%- for w in t -%}{{ w.strip('.') | replace('o', '0') }}-"
    "{%- endfor -%}\n",
    "{{ '%s and %05.1f' | format(messages[0].role, 2.5) }}{{ 'a' * 3 }}{{ 7 // 2 + 2 ** 3 - 5 % 3 }}{{ [1] + [2] }}",
    "{{ messages[1].content | e }}{{ tools is none }}{{ unknown is defined }}{{ unknown }}"
    "{% if not unknown %}!{% endif %}",
    "{% for a in [[1, [2]], [3, []]] recursive %}{{ loop.depth }}{% if a is iterable %}{{ loop(a) }}{% endif %}"
    "{% endfor %}",
]


def explained(template: str) -> str:
    with pytest.raises(PolicyError, match="chat template") as caught:
        ChatTemplate(template).render(MESSAGES, {})
    text = str(caught.value)
    assert len(text) < 700 and "\x1b" not in text
    return text


@pytest.mark.parametrize("name", FOR_EVER)
def test_endless_template_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mas_gym.policies.local.chat.MAX_SECONDS", 0.5)
    started = time.monotonic()
    assert "steps or" in (text := explained(FOR_EVER[name])) or "RecursionError" in text
    assert time.monotonic() - started < 4.0


@pytest.mark.parametrize("name", FLOODS)
def test_template_with_huge_output_is_stopped_in_bounded_memory(name: str) -> None:
    tracemalloc.start()
    try:
        explained(FLOODS[name])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * MAX_CHARS


@pytest.mark.parametrize("name", BROKEN)
def test_broken_template_error_names_the_cause(name: str) -> None:
    explained(BROKEN[name])


@pytest.mark.parametrize("source", SOUND)
def test_valid_template_renders_as_in_transformers(source: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="transformers is not installed")
    given: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    [[expected], _] = utils.render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=True, **given
    )
    template = ChatTemplate(source)
    assert template.render(MESSAGES, given) == template.render(MESSAGES, given) == expected
