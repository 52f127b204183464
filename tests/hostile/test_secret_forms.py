"""Forms of passwords and keys that no name gives away: in addresses, headers and PEM."""

import base64

import pytest

from deployment.deployment_file import read_deployment
from pipeline.settings.make_settings import make_settings
from ppo_core.errors import ConfigError, ModelError
from ppo_core.errors.redaction import describe_secret, redact
from tests.helpers.runs.deployments import example
from tests.helpers.slow_cases import slow

KEY = "\n".join(["canary7Qx" + "A1b2" * 12] * 3)


def pem(kind: str, end: str = "\n") -> str:
    return f"-----BEGIN {kind}-----\n{KEY}\n-----END {kind}-----\n".replace("\n", end)


def basic(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


ADDRESSES = {
    "without a scheme": ("user:canary7Qx@host/db", "canary7Qx"),
    "without a scheme, of an IP address": ("user:canary7Qx@10.0.0.1:5432/db", "canary7Qx"),
    "with a driver": ("mysql+pymysql:user:canary7Qx@host", "canary7Qx"),
    "with a port": ("user:canary7Qx@host:5432", "canary7Qx"),
    "of a domain": ("user:canary7Qx@db.example.com/flow", "canary7Qx"),
    "of this machine": ("root:canary7Qx@localhost", "canary7Qx"),
    "of a number": ("root:canary7Qx@10.0.0.1:3306/db", "canary7Qx"),
    "with a slash, without a scheme": ("user:a/canary7Qx@host/db", "a/canary7Qx"),
    "with a hash, without a scheme": ("user:a#canary7Qx@host/db", "a#canary7Qx"),
    "with an at sign, without a scheme": ("user:a@canary7Qx@host/db", "a@canary7Qx"),
    "with a colon, without a scheme": ("user:a:canary7Qx@host/db", "a:canary7Qx"),
    "with a question mark, without": ("user:a?canary7Qx@host/db", "a?canary7Qx"),
    "a slash": ("postgresql://me:a/canary7Qx@host/db", "a/canary7Qx"),
    "digits and a slash": ("postgresql://me:12/canary7Qx@host/db", "12/canary7Qx"),
    "digits and a hash": ("mysql+pymysql://me:12#canary7Qx@host/db", "12#canary7Qx"),
    "digits and a question mark": ("redis://:12?canary7Qx@host:1/0", "12?canary7Qx"),
    "a slash first": ("postgresql://me:/canary7Qx@host/db", "/canary7Qx"),
    "a hash": ("https://me:a#canary7Qx@host/x", "a#canary7Qx"),
    "a hash first": ("https://me:#canary7Qx@host/x", "#canary7Qx"),
    "a question mark": ("https://me:a?canary7Qx@host/x", "a?canary7Qx"),
    "an at sign": ("https://me:a@canary7Qx@host/x", "a@canary7Qx"),
    "a colon": ("https://me:a:canary7Qx@host/x", "a:canary7Qx"),
    "all of them": ("mssql+pyodbc://me:1/#@?:canary7Qx@host:1433/db?driver=x", "1/#@?:canary7Qx"),
    "IPv6": ("postgresql://me:1/canary7Qx@[::1]:5432/db", "1/canary7Qx"),
}

HEADERS = {
    "bearer": "Authorization: Bearer canary7Qx0123456789",
    "basic": f"Authorization: Basic {basic('me:canary7Qx')}",
    "a short basic": f"Authorization: Basic {basic('me:x')}",
    "token": "authorization=token canary7Qx0123456789",
    "no scheme": "Authorization: canary7Qx0123456789",
    "JSON": '{"Authorization": "Bearer canary7Qx0123456789"}',
    "of a proxy": f"Proxy-Authorization: Basic {basic('me:canary7Qx')}",
    "of OpenTelemetry": "authorization=Bearer canary7Qx0123456789,x=y",
    "only bearer": "Bearer canary7Qx0123456789",
    "only basic": f"Basic {basic('me:canary7Qx')}",
    "an API key": "X-Api-Key: canary7Qx0123456789",
    "GitLab": "PRIVATE-TOKEN: canary7Qx0123456789",
}

KEYS = {
    "PKCS 8": pem("PRIVATE KEY"),
    "RSA": pem("RSA PRIVATE KEY"),
    "OpenSSH": pem("OPENSSH PRIVATE KEY"),
    "EC": pem("EC PRIVATE KEY"),
    "encrypted": pem("ENCRYPTED PRIVATE KEY"),
    "PGP": pem("PGP PRIVATE KEY BLOCK"),
    "in one line": pem("PRIVATE KEY", "\\n"),
    "without an end": pem("PRIVATE KEY").partition("-----END")[0],
    "after a certificate": "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"
    + pem("PRIVATE KEY"),
    "in base64": basic(pem("PRIVATE KEY")),
    "RSA in base64": basic(pem("RSA PRIVATE KEY")),
}

TEXTS = {name: text for name, (text, _) in ADDRESSES.items()} | HEADERS | KEYS


def values_of(text: str) -> list[str]:
    """The parts of a text that nobody may see."""
    parts = ["canary7Qx"] if "canary7Qx" in text else []
    return (
        parts
        + [word for word in text.split() if basic("me:")[:4] == word[:4]]
        + ([text[30:60]] if text.startswith("LS0t") else [])
    )


@pytest.mark.parametrize("case", TEXTS)
def test_it_is_hidden_in_every_message(case: str):
    text = TEXTS[case]
    message = str(ModelError(f"The server at {text} failed."))
    assert values_of(text)
    for value in values_of(text):
        assert value not in message
    assert message.startswith("The server at ")
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize("case", TEXTS)
def test_it_is_refused_in_the_environment_of_a_deployment(case: str):
    table = example("argo")
    table["defaults"] = {**table["defaults"], "environment": {"SERVICE": TEXTS[case]}}
    with pytest.raises(ConfigError, match=r"defaults\.environment\.SERVICE holds") as refused:
        read_deployment(table)
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize("case", TEXTS)
def test_it_is_refused_in_a_setting(case: str):
    with pytest.raises(ConfigError, match=r"judging\.criterion holds") as refused:
        make_settings({"judging": {"criterion": TEXTS[case]}}, {})
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize("case", ADDRESSES)
def test_the_password_of_a_variable_is_hidden_without_its_address(case: str, monkeypatch):
    address, password = ADDRESSES[case]
    monkeypatch.setenv("SERVICE", address)
    assert password not in redact(f"Access denied for me (using {password}9)")


@pytest.mark.parametrize("case", ["PKCS 8", "OpenSSH", "without an end"])
def test_the_lines_of_a_key_in_a_variable_are_hidden(case: str, monkeypatch):
    monkeypatch.setenv("CERTIFICATE", KEYS[case])
    assert "canary" not in redact(f"Invalid line {KEY.splitlines()[1]}")


@pytest.mark.parametrize("name", ["AUTHORIZATION", "PROXY_AUTHORIZATION", "BEARER", "DB_PW"])
def test_a_name_gives_a_secret_away(name: str):
    table = example("argo")
    table["defaults"] = {**table["defaults"], "environment": {name: "a-plain-word"}}
    with pytest.raises(ConfigError, match="a secret, judging by its name"):
        read_deployment(table)


@pytest.mark.parametrize(
    "harmless",
    [
        "localhost:5000/rlhf/flow@sha256:" + "0" * 64,
        "123456789012.dkr.ecr.us-east-1.amazonaws.com/rlhf/flow@sha256:" + "0" * 64,
        "registry:5000/rlhf:1.2",
        "transformers:org/name@main",
        "transformers:gpt2@v1.0",
        "org/name@0123abc:train",
        "org/name@main:config/train[:100]",
        "mailto:me@example.com",
        "pkg:pypi/torch@2.13.0",
        "git@github.com:org/project.git",
        "arn:aws:secretsmanager:us-east-1:123456789012:secret:judge",
        "s3://bucket/user:x@y/rows.jsonl",
        "http://host:8000/x@y",
        "http://[::1]:8000/v1",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
        basic("-----BEGIN CERTIFICATE-----\n" + "MIIB" * 20),
        basic("-----BEGIN PUBLIC KEY-----\n" + "MIIB" * 20),
        "Basic understanding of the topic, and bearer documents of importance",
        "Authorization: required before anything is answered",
        "Is the answer at 10:30@home better?",
        "max_tokens=512",
        "role:assistant@2",
        "file:judge.py@10:20",
        "package:torch@2.13.0, which has no wheel",
    ],
)
def test_what_is_no_secret_is_accepted(harmless: str):
    assert describe_secret(harmless) is None
    assert "(hidden)" not in redact(harmless) or "Authorization" in harmless


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "unit", ["a:b,", "postgres://a:b@", "-----BEGIN PRIVATE KEY-----",
             *slow("a:b", "x:y@", "user:", "Basic ", "Bearer a", "LS0tLS1CRUdJTiB",
                   "authorization: bearer ")],
)  # fmt: skip
def test_no_text_takes_long(unit: str):
    text = unit * (1_000_000 // len(unit))
    redact(text)
    describe_secret(text)
