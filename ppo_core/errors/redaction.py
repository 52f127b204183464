"""Keep passwords, keys and tokens out of messages, logs and files.

A secret is

- the value of an environment variable with a name such as OPENAI_API_KEY or DB_PASSWORD;
- a password or token within the value of any environment variable, for example the password in
  MLFLOW_TRACKING_URI, even if the password appears without that address;
- a text in the form of a well-known token, for example hf_..., or of a private key;
- the value after `Authorization:`, `Bearer` or `Basic`;
- the user, the password and the query of any URL, and the password in `user:password@host`.
"""

import base64
import binascii
import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from markupsafe import escape

MASK = "(hidden)"
"""Text that replaces a secret; Metaflow would read asterisks as marks of bold text."""

MIN_SECRET_CHARACTERS = 8
"""Shorter values of environment variables are not masked, because they are often common words."""

_NAME_OF_SECRET = re.compile(
    r"(?:KEY|KEY_?ID|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_PASS|_PWD|CREDENTIALS?|SIGNATURE|\bSIG"
    r"|CONNECTION_STRING|AUTHORIZATION|BEARER|_PW)[_-]?\d*$",
    re.IGNORECASE,
)
# The query ends before an angle bracket, a backslash, or the quote at the end of a text, so that
# redacted JSON and HTML stay valid.
_USER_OF_URL = re.compile(
    r"://(?:[^/?#\s]*@)?([^?\s]*)(?:\?(?:[^\s\"'<>\\]|[\"'](?![\s,}\])>]|$))*)?", re.MULTILINE
)
_PASSWORD_OF_URL = re.compile(r"://[^/?#\s:@]*:([^/?#\s]+)@")
# Database drivers accept a slash in a password; digits before a slash are a port.
_ODD_PASSWORD_OF_URL = re.compile(
    r"://[^/?#\s:@]*:(?!\d+(?:[/?#]|$)|$|//)((?:(?!://)\S)+)@(?=[\w.\[-])"
)
# In the address of a database, no path contains an `@`, so digits before a slash may begin a
# password.
_PASSWORD_OF_DATABASE = re.compile(
    r"\b(?:postgres|mysql|mariadb|mssql|oracle|redis|mongodb|amqp|clickhouse|snowflake)[\w+]*:"
    r"//[^/?#\s:@]*:((?:(?!://)\S)+)@(?=[\w.\[-])"
)
# `user:password@host` without `//`. A password with a slash is recognized only if a port or a
# database follows the host, so `localhost:5000/image@tag` has no password. A number or a version
# after the `@` is not a host, as in `file:a.py@10:20`. The maximum lengths bound the time for long
# lines.
_PASSWORD_WITHOUT_SCHEME = re.compile(
    r"(?<![\w:/@.+%-])"
    r"(?!(?:mailto|e?-?mail|sips?|xmpp|acct|to|from|cc|author|contact|pkg|urn"
    r"|python|openai|transformers|reward-model):)"
    r"[A-Za-z_][\w.%+-]{0,63}:(?!//)"
    r"((?=[^\s/]{2,128}@[\w.-]+(?![\w/.-]*@))[^\s/]{2,128}|\S{2,128}(?=@[\w.-]+(?:/|:\d)))"
    r"@(?!sha\d+:|\d+(?:\.\d+){0,2}(?![\w.-]))(?=[A-Za-z0-9\[])",
    re.IGNORECASE,
)
_TOKEN_OF_WEB_URL = re.compile(r"\bhttps?://([^/?#\s:@]+)@")
_IN_URLS = (
    _PASSWORD_OF_URL,
    _ODD_PASSWORD_OF_URL,
    _PASSWORD_OF_DATABASE,
    _TOKEN_OF_WEB_URL,
    _PASSWORD_WITHOUT_SCHEME,
)
_PAIR = re.compile(r"([\w.-]+)=([^&;\s#\"']+)")
_QUERY = re.compile(r"://[^?\s]*\?(\S+)")
_TOKEN = re.compile(
    r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2}))"
    r"(?:hf_[A-Za-z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{12,}|github_pat_\w{12,}|glpat-[\w-]{12,}"
    r"|xox[a-z]-[\w-]{8,}|A[KS]IA[0-9A-Z]{12,}"
    # The next two tokens do not begin within a hyphenated word: a search from each of its hyphens
    # could take quadratic time.
    r"|(?:(?<![\w-])|(?<=%[0-9A-Fa-f]{2}))"
    r"(?:sk-(?=[\w-]*\d)[\w-]{12,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*))"
)
_SCHEMES = "bearer|basic|token|apikey|digest|negotiate"
# In JSON, the value ends before an escaped quote or line break.
_IN_VALUE = r"(?:[^\s'\",\\]|\\(?![\"'nrt]))"
_AUTHORIZATION = re.compile(
    r"((?:authorization|x-api-key|x-auth-token|private-token)['\"]?\s*[:=]\s*['\"]?)"
    rf"(?:(?:{_SCHEMES})\s+)?({_IN_VALUE}{{8,}})"
    rf"|((?:authorization)['\"]?\s*[:=]\s*['\"]?(?:{_SCHEMES})\s+)({_IN_VALUE}+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\bBearer\s+(?=[\w.~+/-]{0,200}\d)([\w.~+/-]{12,}=*)", re.IGNORECASE)
_BASIC = re.compile(r"\bBasic\s+([A-Za-z0-9+/]{4,2000}={0,2})", re.IGNORECASE)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r".*?(?:-----END [A-Z0-9 ]*-----|\Z)"
    # The same in base64: `-----BEGIN `, but neither a certificate nor a public key.
    r"|LS0tLS1CRUdJTiB(?!DRVJU|QVUJM)[A-Za-z0-9+/=]{20,}",
    re.DOTALL,
)


def redact(text: object) -> str:
    """Return `text` without secrets, and without the user, password and query of every URL."""
    masked = _PASSWORD_WITHOUT_SCHEME.sub(_masked_group, mask_secrets(str(text)))
    for has in (_PASSWORD_OF_DATABASE, _ODD_PASSWORD_OF_URL):
        masked = has.sub(_without_user, masked)
    return _USER_OF_URL.sub(r"://\1", masked)


def _without_user(found: re.Match[str]) -> str:
    return found[0].partition("://")[0] + "://"


def mask_secrets(text: str) -> str:
    """Return `text` with known secrets, tokens, keys and authorizations masked.

    Unlike `redact`, keep the user, password and query of a URL unless they contain such a secret.
    Use this for documents that quote models and data sets, in which a URL's query is not secret.
    """
    for secret in known_secrets():
        text = text.replace(secret, MASK)
    if "PRIVATE KEY-----" in text or "LS0tLS1CRUdJTiB" in text or "PRIVATE KEY BLOCK" in text:
        text = _PRIVATE_KEY.sub(MASK, text)
    text = _AUTHORIZATION.sub(_masked_value, _TOKEN.sub(MASK, text))
    return _BASIC.sub(_masked_basic, _BEARER.sub(_masked_group, text))


def mask_values(value: Any, *, by_name: bool = False, is_secret: bool = False) -> Any:
    """Return a value for JSON with the secrets in its texts masked.

    Mask before encoding: a mask over a part of encoded JSON could remove the end of a string. A
    value of a type that JSON lacks, such as a date, becomes a text.

    Args:
        value: mappings, lists and single values.
        by_name: whether to mask all texts in a field with the name of a secret.
        is_secret: whether to mask all texts.
    """
    if isinstance(value, Mapping):
        return {
            mask_secrets(name) if isinstance(name, str) else name: mask_values(
                one,
                by_name=by_name,
                is_secret=is_secret or (by_name and names_secret(name)),
            )
            for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_values(one, by_name=by_name, is_secret=is_secret) for one in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return MASK if is_secret else mask_secrets(str(value))


def _masked_value(found: re.Match[str]) -> str:
    """Return the match of a header with the header's value masked."""
    value = found[2] or found[4]
    return found[0][: -len(value)] + MASK


def _masked_group(found: re.Match[str]) -> str:
    begin, end = (place - found.start() for place in found.span(1))
    return found[0][:begin] + MASK + found[0][end:]


def _masked_basic(found: re.Match[str]) -> str:
    return _masked_group(found) if _is_basic(found[1]) else found[0]


def _is_basic(value: str) -> bool:
    """Return whether a text is `user:password` in base64, and not a word."""
    try:
        return b":" in base64.b64decode(value, validate=True)
    except binascii.Error:
        return False


def names_secret(name: str) -> bool:
    """Return whether a variable or setting has a name that is typical of secrets."""
    return _NAME_OF_SECRET.search(name) is not None


def describe_secret(text: str) -> str | None:
    """Return the kind of secret in a setting's value, without the secret; None if there is none."""
    for secret, name in known_secrets().items():
        if secret in text:
            return f"the secret of the environment variable {name}"
    if any(has.search(text) for has in _IN_URLS):
        return "an address with a user or password"
    if any(_secrets_in_pairs(query) for query in _QUERY.findall(text)):
        return "an address with a token"
    if _PRIVATE_KEY.search(text):
        return "a private key"
    if _BEARER.search(text) or any(map(_is_basic, _BASIC.findall(text))):
        return "an authorization"
    if any(_is_value(found) for found in _AUTHORIZATION.finditer(text)):
        return "an authorization"
    return "a token" if _TOKEN.search(text) else None


def _is_value(found: re.Match[str]) -> bool:
    """Return whether a match of _AUTHORIZATION is a header's value, not a word of a sentence."""
    return found[4] is not None or any(character.isdigit() for character in found[2])


def known_secrets() -> Mapping[str, str]:
    """Return secret -> name of its environment variable, the longest secret first."""
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
    """Yield the secrets in one environment variable; each line of a multi-line key is a secret."""
    if names_secret(name):
        yield from (line.strip() for line in value.splitlines() if "-----" not in line)
    for key in _PRIVATE_KEY.findall(value):
        yield from (line.strip() for line in key.splitlines() if "-----" not in line)
    for pattern in (*_IN_URLS, _BEARER):
        yield from pattern.findall(value)
    yield from filter(_is_basic, _BASIC.findall(value))
    headers = filter(_is_value, _AUTHORIZATION.finditer(value))
    yield from (found[2] or found[4] for found in headers)
    # After a driver, the match contains user and password: `mysql+pymysql:user:password@host`.
    yield from (found.partition(":")[2] for found in _PASSWORD_WITHOUT_SCHEME.findall(value))
    yield from _secrets_in_pairs(value)


def _secrets_in_pairs(text: str) -> list[str]:
    """Return the secret values among the pairs `name=value` in a query or connection string."""
    return [value for name, value in _PAIR.findall(text) if names_secret(name)]


def _forms(secret: str) -> set[str]:
    """Return the forms in which URLs, JSON, Python and HTML show a secret."""
    plain = {secret, unquote(secret)}
    quoted = {write(one) for one in plain for write in (quote, quote_plus, repr, json.dumps)}
    # Python escapes quotes as &#x27; and &quot;, and Jinja escapes quotes as &#39; and &#34;.
    quoted |= {html.escape(one) for one in plain} | {str(escape(one)) for one in plain}
    quoted |= {quote(one, safe="") for one in plain}
    return plain | {one.strip("\"'") for one in quoted}
