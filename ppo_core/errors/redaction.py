"""Keep passwords, keys and tokens out of messages, logs and files.

A secret is

- the value of an environment variable whose name says so, for example OPENAI_API_KEY;
- a password or token within the value of any environment variable, for example the password in
  MLFLOW_TRACKING_URI, also where it appears without the address;
- a text in the form of a well-known token, for example hf_...;
- the user, the password and the query of any URL.
"""

import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from urllib.parse import quote, quote_plus, unquote

MASK = "(hidden)"
"""Text in the place of a secret; Metaflow would take asterisks for its marks of bold text."""

MIN_SECRET_CHARACTERS = 8
"""Shorter values of environment variables are not masked, because they are often common words."""

_NAME_OF_SECRET = re.compile(
    r"(?:KEY|KEY_?ID|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_PASS|_PWD|CREDENTIALS?|SIGNATURE|\bSIG"
    r"|CONNECTION_STRING)[_-]?\d*$",
    re.IGNORECASE,
)
_USER_OF_URL = re.compile(r"://(?:[^/?#\s]*@)?([^?\s]*)(?:\?\S*)?")
_PASSWORD_OF_URL = re.compile(r"://[^/?#\s:@]*:([^/?#\s]+)@")
# Database drivers accept a slash in a password; digits before a slash are a port.
_ODD_PASSWORD_OF_URL = re.compile(r"://[^/?#\s:@]*:(?!\d*(?:[/?#]|$))((?:(?!://)\S)+)@")
_TOKEN_OF_WEB_URL = re.compile(r"\bhttps?://([^/?#\s:@]+)@")
_IN_URLS = (_PASSWORD_OF_URL, _ODD_PASSWORD_OF_URL, _TOKEN_OF_WEB_URL)
_PAIR = re.compile(r"([\w.-]+)=([^&;\s#\"']+)")
_QUERY = re.compile(r"://[^?\s]*\?(\S+)")
_TOKEN = re.compile(
    r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2}))"
    r"(?:hf_[A-Za-z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{12,}|github_pat_\w{12,}|glpat-[\w-]{12,}"
    r"|xox[a-z]-[\w-]{8,}|A[KS]IA[0-9A-Z]{12,}"
    # These do not begin within a word with hyphens, so that no text takes quadratic time.
    r"|(?:(?<![\w-])|(?<=%[0-9A-Fa-f]{2}))"
    r"(?:sk-(?=[\w-]*\d)[\w-]{12,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*))"
)
_AUTHORIZATION = re.compile(
    r"(authorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic)\s+)?)[^\s'\",]{8,}", re.IGNORECASE
)


def redact(text: object) -> str:
    """Return `text` without secrets, and without user, password and query in every URL."""
    return _USER_OF_URL.sub(r"://\1", mask_secrets(str(text)))


def mask_secrets(text: str) -> str:
    """Return `text` with secrets masked; URLs without a secret keep user and query.

    Use it for documents that quote texts of models and data sets: a query there is no secret.
    """
    for secret in known_secrets():
        text = text.replace(secret, MASK)
    return _AUTHORIZATION.sub(rf"\1{MASK}", _TOKEN.sub(MASK, text))


def names_secret(name: str) -> bool:
    """Return whether a name of a variable or setting says that its value is secret."""
    return _NAME_OF_SECRET.search(name) is not None


def describe_secret(text: str) -> str | None:
    """Return what kind of secret a setting's value holds, without the secret; None if none."""
    for secret, name in known_secrets().items():
        if secret in text:
            return f"the secret of the environment variable {name}"
    if any(has.search(text) for has in _IN_URLS):
        return "an address with a user or password"
    if any(_secrets_in_pairs(query) for query in _QUERY.findall(text)):
        return "an address with a token"
    return "a token" if _TOKEN.search(text) else None


def known_secrets() -> Mapping[str, str]:
    """Return the name of the environment variable of each secret, the longest secret first."""
    return _secrets_of(tuple(os.environ.items()))


@lru_cache(maxsize=4)
def _secrets_of(environment: tuple[tuple[str, str], ...]) -> dict[str, str]:
    found = {
        form: name
        for name, value in environment
        for secret in _secrets_in(name, value)
        for form in _forms(secret)
        if len(form) >= MIN_SECRET_CHARACTERS
    }
    return {secret: found[secret] for secret in sorted(found, key=len, reverse=True)}


def _secrets_in(name: str, value: str) -> Iterator[str]:
    """Yield the secrets in one environment variable; a key of several lines has one per line."""
    if names_secret(name):
        yield from (line.strip() for line in value.splitlines() if "-----" not in line)
    for pattern in _IN_URLS:
        yield from pattern.findall(value)
    yield from _secrets_in_pairs(value)


def _secrets_in_pairs(text: str) -> list[str]:
    """Return the values of `name=value` in a query or connection string that are secret."""
    return [value for name, value in _PAIR.findall(text) if names_secret(name)]


def _forms(secret: str) -> set[str]:
    """Return the forms in which URLs, JSON, Python and HTML show a secret."""
    plain = {secret, unquote(secret)}
    quoted = {write(one) for one in plain for write in (quote, quote_plus, repr, json.dumps)}
    quoted |= {quote(one, safe="") for one in plain} | {html.escape(one) for one in plain}
    return plain | {one.strip("\"'") for one in quoted}
