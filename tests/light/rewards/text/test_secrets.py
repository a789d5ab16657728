"""What counts as a secret in settings and texts, and what stays."""

import pytest

from trl_ext.rewards.text.secrets import hide, public, secrets_in

KEY = "SEKRET0123456789abcdef"
TEXTS = {
    "a password with a slash": f"https://ann:a/{KEY}@host/x",
    "a password with @": f"https://ann:a@{KEY}@host/x",
    "Groq": f"gsk_{KEY}",
    "GitLab": f"glpat-{KEY}",
    "Slack": f"xoxb-{KEY}",
    "Google": f"AIza{KEY}",
    "Stripe": f"sk_live_{KEY}",
    "a JSON web token": f"eyJ{KEY}.eyJ{KEY}.{KEY}",
    "a header": f"Authorization: Basic {KEY}",
    "a header of any name": f"X-Api-Key: {KEY}",
    "headers in YAML": f"headers:\n  Proxy-Authorization: Token {KEY}\n",
    "an assignment": f"OPENAI_API_KEY={KEY} python x.py",
    "a connection": f"Server=h;AccountKey={KEY}==;",
    "JSON with a quotation mark": '{"text": {{ x }}, "password": "it\'s KEY"}'.replace("KEY", KEY),
    "JSON in JSON": r"said {\"api_key\": \"KEY\"}".replace("KEY", KEY),
    "a webhook": f"https://hooks.example.com/services/T0/B0/{KEY}",
    "a bot's address": "https://api.example.org/bot1234:SEKRET01/send",
}
ENTRIES = {
    "sas_token": KEY,
    "judge_token": KEY,
    "x-auth": KEY,
    "auth": f"Basic {KEY}",
    "basic_auth": ["ann", KEY],
    "options": {"key": KEY},
    "headers": [f"Authorization: Basic {KEY}"],
    "pairs": [["X-Api-Key", KEY], ["Accept", "json"]],
}
PLAIN = [
    {"pad_token": "<pad>", "image_token": "<image>", "cost_per_token": 2, "author": "ann", "max_tokens": 8},
    {"key": "answer", "options": {"key": "right answer 1"}, "names": [["key", "gold"]]},
    "https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct/resolve/main/model-00001-of-00002.safetensors?download=true",
    "http://localhost:8000/v1/models/gemma:generateContent",
    "file:///tmp/run0123456789abcdef/model",
    "Rule 'x': token: give a text, name=5, a ratio of 3:1 and me@example.org",
]


@pytest.mark.parametrize("what", TEXTS)
def test_secrets_within_a_text_are_hidden(what):
    assert "SEKRET" not in public(TEXTS[what])
    assert "SEKRET" not in hide(f"quoted: {TEXTS[what]}", secrets_in({"url": TEXTS[what]}))


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_that_hold_secrets_are_hidden_and_found(name):
    assert KEY not in str(public({"extra_body": {name: ENTRIES[name]}}))
    assert any(KEY in secret for secret in secrets_in({"extra_body": {name: ENTRIES[name]}}))


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_what_is_no_secret_stays(value):
    assert public(value) == value


def test_a_secret_of_fewer_than_eight_characters_is_hidden_in_no_reply():
    assert hide('{"score": 10, "key": "12345678"}', {"10", "score", "12345678"}) == '{"score": 10, "key": "***"}'
