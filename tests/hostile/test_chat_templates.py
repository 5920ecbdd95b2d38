"""Chat templates from a model's files: valid ones render as in transformers, broken ones raise a `PolicyError`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import local_models

from mas_gym.errors import PolicyError
from mas_gym.policies import chat_templates
from mas_gym.policies.local.chat import ChatFormat, rendered
from mas_gym.systems.prompts import ChatMessage

MESSAGES = [ChatMessage("system", "You are the Solver."), ChatMessage("user", 'Is 3 < 4 & "5"?\n')]
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
    "a lone surrogate": r"{{ '\ud800' }}",
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


@pytest.mark.parametrize("name", BROKEN)
def test_broken_template_error_names_the_cause(name: str) -> None:
    with pytest.raises(PolicyError, match="chat template") as caught:
        rendered(local_models.tokenizer(BROKEN[name]), MESSAGES)
    text = str(caught.value)
    assert len(text) < 700 and "\x1b" not in text


@pytest.mark.parametrize("source", SOUND)
def test_valid_template_renders_as_in_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer = local_models.tokenizer(source)
    [[expected], _] = render_jinja_template(
        conversations=[[message._asdict() for message in MESSAGES]],
        chat_template=source,
        add_generation_prompt=True,
        **tokenizer.special_tokens_map,
    )
    assert rendered(tokenizer, MESSAGES, tokenize=False) == expected
    assert rendered(tokenizer, MESSAGES) == tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_template_that_does_not_end_fails_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "SECONDS", 0.5)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    only_long = "{% if messages[-1].content|length > 99 %}" + loops + "{% endif %}{{ messages[-1].content }}"
    with pytest.raises(PolicyError, match=r"more than 0\.5 seconds"):
        ChatFormat(local_models.tokenizer(loops), 128)
    talk = ChatFormat(local_models.tokenizer(only_long), 128)
    with pytest.raises(PolicyError, match=r"more than 0\.5 seconds"):
        talk.encode([ChatMessage("user", "x" * 100)], 8)
    # The process starts again.
    assert rendered(talk.tokenizer, [ChatMessage("user", "hello")], tokenize=False) == "hello"


@pytest.mark.parametrize("source", ["{{ 'ab' * 10**9 * 10 }}", "{{ 'a' * 20000000 }}"])
def test_template_with_a_huge_text_is_rejected(source: str) -> None:
    with pytest.raises(PolicyError, match="chat template failed"):
        rendered(local_models.tokenizer(source), MESSAGES)
