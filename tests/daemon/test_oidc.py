"""Tokens of an OpenID provider, signed here, and its keys, served on the loopback address."""

import asyncio
import base64
import hmac
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joserfc import jwt
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey

from koalapy.config.provider import Provider
from koalapy.daemon.auth.oidc import (
    LEEWAY,
    MAX_AGE,
    MAX_KNOWN,
    MAX_SIZE,
    MAX_SPAN,
    MIN_PAUSE,
    Oidc,
    ProviderKeys,
    fetch_content,
    parse_signing_keys,
)
from koalapy.model.errors import SiteUnavailable, TokenRejected
from koalapy.model.identity import Role

NOW = 1_800_000_000.0
ISSUER = "https://sso.example.org/realms/site"
ALICE = {"sub": "5f1c", "email": "alice@example.org", "email_verified": True, "preferred_username": "alice"}
PROVIDER = Provider(ISSUER, "koala", jwks_file="/nowhere", users={"5f1c": "alice"})
RSA = RSAKey.generate_key(2048, {"kid": "rsa"})
EC = ECKey.generate_key("P-256", {"kid": "ec"})
ED = OKPKey.generate_key("Ed25519", {"kid": "ed"})
SIGNED_BY: dict[str, Key] = {"RS256": RSA, "ES256": EC, "EdDSA": ED}


def public_keys(*keys: Key) -> bytes:
    return json.dumps({"keys": [key.as_dict(private=False) for key in keys]}).encode()


def make_token(key: Key = EC, alg: str = "ES256", header: dict[str, Any] | None = None, **claims: Any) -> str:
    """Return a token of Alice that is valid for five minutes, with other claims; None omits a claim."""
    complete_claims = {"iss": ISSUER, "aud": "koala", "iat": int(NOW) - 10, "exp": int(NOW) + 300} | ALICE | claims
    head = {"alg": alg, "kid": key.kid} | (header or {})
    head = {name: value for name, value in head.items() if value is not None}
    return jwt.encode(head, {n: v for n, v in complete_claims.items() if v is not None}, key, algorithms=[alg])


class Keys:
    """Serves the provider's keys and counts the requests."""

    def __init__(self, *keys: Key) -> None:
        self.content, self.asked = public_keys(*keys), 0
        self.fails: Exception | None = None

    async def __call__(self) -> bytes:
        self.asked += 1
        if self.fails:
            raise self.fails
        return self.content


class Clock:
    def __init__(self, now: float) -> None:
        self.at = now

    def __call__(self) -> float:
        return self.at


def make_verifier(
    provider: Provider = PROVIDER, keys: Keys | None = None, clock: Callable[[], float] = lambda: NOW
) -> Oidc:
    return Oidc(provider, keys or Keys(RSA, EC, ED), clock)


def with_rule(**rule: Any) -> Provider:
    return Provider(ISSUER, "koala", jwks_file="/nowhere", **rule)


@pytest.mark.parametrize("alg", SIGNED_BY)
async def test_token_signed_by_provider_is_accepted(alg: str) -> None:
    verified = await make_verifier().verify_token(make_token(SIGNED_BY[alg], alg))
    assert (verified.user, verified.role, verified.expires_at) == ("alice", None, NOW + 300)


@pytest.mark.evidence("C2", "O1")
@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://sso.example.org/realms/other"},
        {"iss": None},
        {"aud": "another"},
        {"aud": ["another"]},
        {"aud": None},
        {"aud": []},
        {"exp": int(NOW) - LEEWAY - 1},
        {"exp": None},
        {"exp": "never"},
        {"exp": True},
        {"nbf": int(NOW) + LEEWAY + 5},
        {"iat": int(NOW) + LEEWAY + 5},
        {"sub": "another"},
        {"sub": None},
        {"sub": ["5f1c"]},
        {"sub": ""},
    ],
)
async def test_token_with_wrong_claims_is_rejected(claims: dict[str, Any]) -> None:
    with pytest.raises(TokenRejected):
        await make_verifier().verify_token(make_token(**claims))


async def test_token_for_several_audiences_or_within_clock_leeway_is_accepted() -> None:
    leeway = {"exp": int(NOW) - LEEWAY + 2}, {"nbf": int(NOW) + LEEWAY - 2}, {"iat": int(NOW) + LEEWAY - 2}
    for claims in ({"aud": ["account", "koala"]}, *leeway):
        assert (await make_verifier().verify_token(make_token(**claims))).user == "alice"


def make_unsigned_token(head: dict[str, Any]) -> str:
    """Return a token with this header and no signature."""
    claims = {"iss": ISSUER, "aud": "koala", "exp": int(NOW) + 300} | ALICE
    parts = (encode_part(json.dumps(part).encode()) for part in (head, claims))
    return ".".join([*parts, ""])


def encode_part(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


def sign_with_secret(secret: bytes) -> str:
    """Return a token that is signed with a public key as if that were a shared secret."""
    signed = make_unsigned_token({"alg": "HS256", "kid": "rsa"}).rpartition(".")[0]
    return f"{signed}.{encode_part(hmac.digest(secret, signed.encode(), 'sha256'))}"


def forge_tokens() -> Iterator[str]:
    """Yield tokens that the provider has not signed."""
    for alg in ("none", "None", "NONE", "", None, "HS256", 5, ["ES256"]):
        yield make_unsigned_token({"alg": alg, "kid": "ec"})
    yield make_unsigned_token({"alg": "ES256", "kid": "ec", "crit": ["exp"], "exp": 1})
    for secret in (RSA.as_pem(private=False), public_keys(RSA), EC.as_pem(private=False)):
        yield sign_with_secret(secret)
    foreign_key = ECKey.generate_key("P-256", {"kid": "ec"})
    named: dict[str, Any] = {"jku": "http://127.0.0.1:1/keys", "x5u": "http://127.0.0.1:1/x"}
    for header in ({}, {"jwk": foreign_key.as_dict(private=False)}, *({name: uri} for name, uri in named.items())):
        yield make_token(foreign_key, header=header)
    good, other_token = make_token(), make_token(sub="other")
    head, _, signature = good.split(".")
    yield from (f"{head}.{other_token.split('.')[1]}.{signature}", f"{good}A", good[:-4], f"{good}.{signature}")
    for key, alg in ((RSA, "ES256"), (EC, "RS256"), (ED, "ES256")):
        head = encode_part(json.dumps({"alg": alg, "kid": key.kid}).encode())
        yield f"{head}.{good.split('.', 1)[1]}"


@pytest.mark.evidence("O1")
async def test_token_that_the_provider_has_not_signed_is_rejected() -> None:
    for token in forge_tokens():
        with pytest.raises(TokenRejected):
            await make_verifier().verify_token(token)


@given(st.one_of(st.text(max_size=60), st.tuples(*[st.text("abcXYZ019-_=", max_size=30)] * 3).map(".".join)))
def test_token_malformed_is_rejected(text: str) -> None:
    with pytest.raises(TokenRejected):
        asyncio.run(make_verifier().verify_token(text))


@given(st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "b64"]), st.none() | st.integers() | st.text()))
def test_token_with_malformed_header_is_rejected(header: dict[str, Any]) -> None:
    with pytest.raises(TokenRejected):
        asyncio.run(make_verifier().verify_token(make_unsigned_token(header)))


# Users and roles


@pytest.mark.evidence("O2")
@pytest.mark.parametrize(
    ("rule", "claims", "user"),
    [
        ({"claim": "email", "users": {"alice@example.org": "al"}}, {}, "al"),
        ({"claim": "email", "users": {"alice@example.org": "al"}}, {"email_verified": False}, None),
        ({"claim": "email", "users": {"alice@example.org": "al"}}, {"email_verified": None}, None),
        ({"claim": "email", "users": {"alice@example.org": "al"}}, {"email_verified": "true"}, None),
        ({"claim": "email", "pattern": r"(.+)@example\.org"}, {}, "alice"),
        ({"claim": "email", "pattern": r"(.+)@example\.org"}, {"email": "alice@example.org.evil"}, None),
        ({"claim": "email", "pattern": r"(.+)@example\.org"}, {"email": "x@north@example.org"}, None),
        ({"claim": "email", "pattern": r"(.+)@example\.org"}, {"email": "a b@example.org"}, None),
        ({"claim": "email", "pattern": r"(.+)@example\.org"}, {"email": "é@example.org"}, None),
        ({"claim": "email", "pattern": r"(.+)@example\.org"}, {"email": "bob\n@example.org"}, None),
        ({"claim": "email", "pattern": r"(.*)@example\.org"}, {"email": "@example.org"}, None),
        ({"claim": "preferred_username", "pattern": "(.+)"}, {}, "alice"),
        ({"claim": "preferred_username", "pattern": "(.+)"}, {"preferred_username": "a" * 201}, None),
        ({"claim": "preferred_username", "pattern": "(.+)", "users": {"alice": "al"}}, {}, "al"),
        ({"users": {"another": "bob"}}, {}, None),
    ],
)
async def test_token_claim_is_mapped_to_user(rule: dict[str, Any], claims: dict[str, Any], user: str | None) -> None:
    verifying = make_verifier(with_rule(**rule)).verify_token(make_token(**claims))
    if user is None:
        with pytest.raises(TokenRejected, match="names no configured user"):
            await verifying
    else:
        assert (await verifying).user == user


@pytest.mark.parametrize(
    ("claim", "role"),
    [
        ("ops", Role.OPERATOR),
        (["ops", "staff", "admins"], Role.ADMIN),
        (["staff"], None),
        ([["ops"], 5, None], None),
        ({"ops": 1}, None),
        (None, None),
    ],
)
async def test_token_claim_is_mapped_to_role(claim: Any, role: Role | None) -> None:
    provider = with_rule(
        users={"5f1c": "alice"}, role_claim="groups", roles={"ops": Role.OPERATOR, "admins": Role.ADMIN}
    )
    assert (await make_verifier(provider).verify_token(make_token(groups=claim))).role == role


# Cached verifications


async def test_token_verification_is_cached_until_expiry() -> None:
    clock, token = Clock(NOW), make_token()
    verifier = make_verifier(clock=clock)
    assert verifier.cached_result(token) is None
    first = await verifier.verify_token(token)
    assert verifier.cached_result(token) is first
    clock.at = NOW + 300
    assert verifier.cached_result(token) is None


async def test_token_with_long_lifetime_is_cached_for_a_day() -> None:
    for exp in (int(NOW) + 10**9, 10**400):
        assert (await make_verifier().verify_token(make_token(exp=exp))).expires_at == NOW + MAX_SPAN


async def test_token_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("koalapy.daemon.auth.oidc.MAX_KNOWN", 2)
    assert MAX_KNOWN > 1000
    verifier, tokens = make_verifier(), [make_token(jti=str(number)) for number in range(3)]
    for token in tokens:
        await verifier.verify_token(token)
    assert [verifier.cached_result(token) is not None for token in tokens] == [False, True, True]


# The provider's keys


async def test_provider_keys_unknown_id_fetches_keys() -> None:
    time, keys = Clock(0.0), Keys(RSA)
    verifier = Oidc(PROVIDER, keys, lambda: NOW, keys_clock=time)
    await verifier.verify_token(make_token(RSA, "RS256"))
    keys.content = public_keys(RSA, EC)
    time.at += MIN_PAUSE
    assert (await verifier.verify_token(make_token(EC))).user == "alice"
    assert keys.asked == 2


@pytest.mark.evidence("O5")
async def test_provider_keys_unknown_ids_are_fetched_rarely() -> None:
    time, keys = Clock(0.0), Keys(RSA)
    verifier = Oidc(PROVIDER, keys, lambda: NOW, keys_clock=time)
    for number in range(20):
        with pytest.raises(TokenRejected):
            await verifier.verify_token(make_token(ECKey.generate_key("P-256", {"kid": f"{number}"})))
    assert keys.asked == 1


@pytest.mark.evidence("O4")
async def test_token_of_withdrawn_key_is_rejected() -> None:
    keys, token = Keys(RSA, EC), make_token(EC)
    verifier = make_verifier(keys=keys)
    await verifier.verify_token(token)
    keys.content = public_keys(RSA)
    await verifier.keys.refresh_keys()
    assert verifier.cached_result(token) is None
    with pytest.raises(TokenRejected):
        await verifier.verify_token(token)


async def test_provider_keys_outlast_short_outage() -> None:
    time, keys = Clock(0.0), Keys(EC)
    verifier = Oidc(PROVIDER, keys, lambda: NOW, keys_clock=time)
    await verifier.verify_token(token := make_token())
    keys.fails = OSError("no route")
    time.at += MAX_AGE - 1
    await verifier.keys.refresh_keys()
    assert verifier.cached_result(token)
    time.at += 1
    await verifier.keys.refresh_keys()
    assert verifier.cached_result(token) is None
    with pytest.raises(SiteUnavailable, match="no route"):
        await verifier.verify_token(token)


async def test_provider_keys_concurrent_requests_fetch_once() -> None:
    going_on = asyncio.Event()
    keys = Keys(EC)

    async def slow() -> bytes:
        await going_on.wait()
        return await keys()

    verifier = Oidc(PROVIDER, slow, lambda: NOW)
    verifying = [asyncio.ensure_future(verifier.verify_token(make_token(jti=str(number)))) for number in range(10)]
    await asyncio.sleep(0)
    going_on.set()
    assert [verified.user for verified in await asyncio.gather(*verifying)] == ["alice"] * 10
    assert keys.asked == 1


async def test_provider_keys_hanging_provider_times_out() -> None:
    async def hang() -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(SiteUnavailable, match="TimeoutError"):
        await ProviderKeys(hang, lambda: None).for_id("ec")


def test_parse_signing_keys_accepts_strong_public_keys_only() -> None:
    served = [
        RSAKey.generate_key(1024, {"kid": "weak"}).as_dict(private=False),
        OctKey.generate_key(256, {"kid": "secret"}).as_dict(),
        ECKey.generate_key("P-384", {"kid": "another curve"}).as_dict(private=False),
        RSA.as_dict(private=False) | {"kid": "for encryption", "use": "enc"},
        RSA.as_dict(private=False) | {"kid": "for others", "key_ops": ["encrypt"]},
        {"kty": "RSA"},
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "no point"},
        {"kty": "new"},
        5,
        EC.as_dict(private=False),
    ]
    assert [key.kid for key in parse_signing_keys(json.dumps({"keys": served}).encode())] == ["ec"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"keys": []}', b'{"keys": 5}', b"\xff", b"[" * 100_000])
def test_parse_signing_keys_of_invalid_document_fails(content: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        parse_signing_keys(content)


async def test_provider_keys_are_read_from_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    verifier = Oidc(Provider(ISSUER, "koala", jwks_file=str(file), users={"5f1c": "alice"}), clock=lambda: NOW)
    with pytest.raises(SiteUnavailable, match=r"keys\.json"):
        await verifier.verify_token(make_token())
    file.write_bytes(public_keys(EC))
    await verifier.keys.refresh_keys()
    assert (await verifier.verify_token(make_token())).user == "alice"


@asynccontextmanager
async def serve_keys(answer: bytes) -> AsyncIterator[str]:
    """Serve one fixed answer on the loopback address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/jwks"


def http_answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def test_provider_keys_are_fetched_over_http() -> None:
    async with serve_keys(http_answer(public_keys(EC))) as uri:
        verifier = Oidc(Provider(ISSUER, "koala", jwks_uri=uri, users={"5f1c": "alice"}), clock=lambda: NOW)
        assert (await verifier.verify_token(make_token())).user == "alice"


async def test_fetch_content_limits_size_and_follows_no_redirect() -> None:
    async with serve_keys(http_answer(b"x" * (4 * MAX_SIZE))) as uri:
        assert MAX_SIZE < len(await fetch_content(uri)) < 2 * MAX_SIZE
    async with (
        serve_keys(http_answer(public_keys(EC))) as uri,
        serve_keys(http_answer(b"", "302 Found", f"Location: {uri}")) as elsewhere,
    ):
        with pytest.raises(ValueError, match="302"):
            await fetch_content(elsewhere)


ROLES = {"staff": Role.OPERATOR, "root": Role.ADMIN}


async def test_role_of_user_without_token_is_highest_possible() -> None:
    by_name = make_verifier(with_rule(users={"5f1c": "alice"}, role_claim="groups", roles=ROLES))
    assert [by_name.role_of(user) for user in ("alice", "bob")] == [Role.ADMIN, Role.USER]
    by_pattern = make_verifier(with_rule(pattern="(.+)", role_claim="groups", roles=ROLES))
    assert [by_pattern.role_of(user) for user in ("anne", "anne@north")] == [Role.ADMIN, Role.USER]
    assert make_verifier().role_of("alice") is Role.USER


async def test_role_of_user_is_highest_of_valid_tokens() -> None:
    clock = Clock(NOW)
    verifier = make_verifier(with_rule(users={"5f1c": "alice"}, role_claim="groups", roles=ROLES), clock=clock)
    await verifier.verify_token(make_token(groups="root"))
    await verifier.verify_token(make_token(groups="nothing", exp=int(NOW) + 900))
    assert verifier.role_of("alice") is Role.ADMIN
    clock.at += 301.0
    assert verifier.role_of("alice") is Role.ADMIN, "no other token was shown since"
    await verifier.verify_token(make_token(groups="staff", exp=int(NOW) + 900))
    assert verifier.role_of("alice") is Role.OPERATOR
