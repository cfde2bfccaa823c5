"""Tokens of an OpenID provider, made and signed here, and its keys served on the loopback address."""

import asyncio
import base64
import hmac
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joserfc import jwt
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey

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
from koalapy.model.identity import Provider, Role

NOW = 1_800_000_000.0
ISSUER = "https://sso.example.org/realms/site"
ALICE = {"sub": "5f1c", "email": "alice@example.org", "email_verified": True, "preferred_username": "alice"}
PROVIDER = Provider(ISSUER, "koala", jwks_file="/nowhere", users={"5f1c": "alice"})
RSA = RSAKey.generate_key(2048, {"kid": "rsa"})
EC = ECKey.generate_key("P-256", {"kid": "ec"})
ED = OKPKey.generate_key("Ed25519", {"kid": "ed"})
SIGNED_BY: dict[str, Key] = {"RS256": RSA, "ES256": EC, "EdDSA": ED}


def public(*keys: Key) -> bytes:
    return json.dumps({"keys": [key.as_dict(private=False) for key in keys]}).encode()


def made(key: Key = EC, alg: str = "ES256", header: dict[str, Any] | None = None, **claims: Any) -> str:
    """A token of Alice's that is good for five minutes, but for what is given; what is None is left out."""
    told = {"iss": ISSUER, "aud": "koala", "iat": int(NOW) - 10, "exp": int(NOW) + 300} | ALICE | claims
    head = {"alg": alg, "kid": key.kid} | (header or {})
    head = {name: value for name, value in head.items() if value is not None}
    return jwt.encode(head, {n: v for n, v in told.items() if v is not None}, key, algorithms=[alg])


class Keys:
    """What the provider serves, and how often it was asked."""

    def __init__(self, *keys: Key) -> None:
        self.content, self.asked = public(*keys), 0
        self.fails: Exception | None = None

    async def __call__(self) -> bytes:
        self.asked += 1
        if self.fails:
            raise self.fails
        return self.content


class Clock:
    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def oidc(provider: Provider = PROVIDER, keys: Keys | None = None, clock: Callable[[], float] = lambda: NOW) -> Oidc:
    return Oidc(provider, keys or Keys(RSA, EC, ED), clock)


def with_rule(**rule: Any) -> Provider:
    return Provider(ISSUER, "koala", jwks_file="/nowhere", **rule)


@pytest.mark.parametrize("alg", SIGNED_BY)
async def test_a_token_is_believed_that_the_provider_has_signed(alg: str) -> None:
    verified = await oidc().verify_token(made(SIGNED_BY[alg], alg))
    assert (verified.user, verified.role, verified.expires_at) == ("alice", None, NOW + 300)


async def test_a_list_of_audiences_with_ours_is_as_good() -> None:
    assert (await oidc().verify_token(made(aud=["account", "koala"]))).user == "alice"


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
async def test_no_token_is_believed_that_is_not_for_us_not_now_or_nobody_s(claims: dict[str, Any]) -> None:
    with pytest.raises(TokenRejected):
        await oidc().verify_token(made(**claims))


async def test_clocks_may_differ_a_little() -> None:
    for claims in ({"exp": int(NOW) - LEEWAY + 2}, {"nbf": int(NOW) + LEEWAY - 2}, {"iat": int(NOW) + LEEWAY - 2}):
        assert (await oidc().verify_token(made(**claims))).user == "alice"


def unsigned(head: dict[str, Any]) -> str:
    """A token with that header and no signature."""
    claims = {"iss": ISSUER, "aud": "koala", "exp": int(NOW) + 300} | ALICE
    parts = (base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in (head, claims))
    return ".".join([*parts, ""])


@pytest.mark.evidence("O1")
@pytest.mark.parametrize("alg", ["none", "None", "NONE", "", None, "HS256", 5, ["ES256"]])
async def test_without_a_signature_of_the_provider_s_nobody_is_believed(alg: Any) -> None:
    with pytest.raises(TokenRejected):
        await oidc().verify_token(unsigned({"alg": alg, "kid": "ec"}))


@pytest.mark.evidence("O1")
async def test_the_public_key_is_no_secret_to_sign_with() -> None:
    for secret in (RSA.as_pem(private=False), public(RSA), EC.as_pem(private=False)):
        head, claims, _ = unsigned({"alg": "HS256", "kid": "rsa"}).split(".")
        signature = hmac.digest(secret, f"{head}.{claims}".encode(), "sha256")
        with pytest.raises(TokenRejected, match="HS256"):
            await oidc().verify_token(f"{head}.{claims}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}")


@pytest.mark.evidence("O1")
async def test_a_key_of_somebody_else_s_does_not_count_wherever_it_says_that_it_is() -> None:
    own = ECKey.generate_key("P-256", {"kid": "ec"})
    served = own.as_dict(private=False)
    for header in ({}, {"jwk": served}, {"jku": "http://127.0.0.1:1/keys"}, {"x5u": "http://127.0.0.1:1/x"}):
        with pytest.raises(TokenRejected):
            await oidc().verify_token(made(own, header=header))


async def test_what_was_signed_is_what_counts() -> None:
    good, other = made(), made(sub="other")
    head, _, signature = good.split(".")
    for forged in (f"{head}.{other.split('.')[1]}.{signature}", f"{good}A", good[:-4], good + "." + signature):
        with pytest.raises(TokenRejected):
            await oidc().verify_token(forged)


async def test_a_key_signs_by_its_own_algorithm_only() -> None:
    for key, alg in ((RSA, "ES256"), (EC, "RS256"), (ED, "ES256")):
        head = base64.urlsafe_b64encode(json.dumps({"alg": alg, "kid": key.kid}).encode()).rstrip(b"=").decode()
        with pytest.raises(TokenRejected):
            await oidc().verify_token(f"{head}.{made().split('.', 1)[1]}")


async def test_what_a_token_says_to_be_critical_is_not_passed_over() -> None:
    with pytest.raises(TokenRejected):
        await oidc().verify_token(unsigned({"alg": "ES256", "kid": "ec", "crit": ["exp"], "exp": 1}))


@given(st.one_of(st.text(max_size=60), st.tuples(*[st.text("abcXYZ019-_=", max_size=30)] * 3).map(".".join)))
def test_what_is_no_token_is_refused_and_nothing_else(text: str) -> None:
    with pytest.raises(TokenRejected):
        asyncio.run(oidc().verify_token(text))


@given(st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "b64"]), st.none() | st.integers() | st.text()))
def test_so_is_one_with_whatever_header(header: dict[str, Any]) -> None:
    with pytest.raises(TokenRejected):
        asyncio.run(oidc().verify_token(unsigned(header)))


# Whose it is


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
        ({}, {}, None),
    ],
)
async def test_a_claim_becomes_a_user_by_rule(rule: dict[str, Any], claims: dict[str, Any], user: str | None) -> None:
    verifying = oidc(with_rule(**rule)).verify_token(made(**claims))
    if user is None:
        with pytest.raises(TokenRejected, match="is not a known user"):
            await verifying
    else:
        assert (await verifying).user == user


@pytest.mark.parametrize(
    ("told", "role"),
    [
        ("ops", Role.OPERATOR),
        (["ops", "staff", "admins"], Role.ADMIN),
        (["staff"], None),
        ([["ops"], 5, None], None),
        ({"ops": 1}, None),
        (None, None),
    ],
)
async def test_a_claim_may_give_a_role(told: Any, role: Role | None) -> None:
    provider = with_rule(
        users={"5f1c": "alice"}, role_claim="groups", roles={"ops": Role.OPERATOR, "admins": Role.ADMIN}
    )
    assert (await oidc(provider).verify_token(made(groups=told))).role == role


# Once verified


async def test_a_token_is_verified_once_and_known_until_it_expires() -> None:
    clock, token = Clock(NOW), made()
    verifier = oidc(clock=clock)
    assert verifier.cached_result(token) is None
    first = await verifier.verify_token(token)
    assert verifier.cached_result(token) is first
    clock.at = NOW + 300
    assert verifier.cached_result(token) is None


async def test_one_that_is_good_for_ever_is_so_for_a_day() -> None:
    for exp in (int(NOW) + 10**9, 10**400):
        assert (await oidc().verify_token(made(exp=exp))).expires_at == NOW + MAX_SPAN


async def test_not_all_that_were_ever_verified_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("koalapy.daemon.auth.oidc.MAX_KNOWN", 2)
    assert MAX_KNOWN > 1000
    verifier, tokens = oidc(), [made(jti=str(number)) for number in range(3)]
    for token in tokens:
        await verifier.verify_token(token)
    assert [verifier.cached_result(token) is not None for token in tokens] == [False, True, True]


# The provider's keys


async def test_a_new_key_is_fetched_when_a_token_names_it() -> None:
    time, keys = Clock(0.0), Keys(RSA)
    verifier = Oidc(PROVIDER, keys, lambda: NOW, keys_clock=time)
    await verifier.verify_token(made(RSA, "RS256"))
    keys.content = public(RSA, EC)
    time.at += MIN_PAUSE
    assert (await verifier.verify_token(made(EC))).user == "alice"
    assert keys.asked == 2


@pytest.mark.evidence("O5")
async def test_who_names_keys_that_there_are_not_has_them_fetched_now_and_then_only() -> None:
    time, keys = Clock(0.0), Keys(RSA)
    verifier = Oidc(PROVIDER, keys, lambda: NOW, keys_clock=time)
    for number in range(20):
        with pytest.raises(TokenRejected):
            await verifier.verify_token(made(ECKey.generate_key("P-256", {"kid": f"{number}"})))
    assert keys.asked == 1


@pytest.mark.evidence("O4")
async def test_what_a_withdrawn_key_has_signed_is_believed_no_longer() -> None:
    keys, token = Keys(RSA, EC), made(EC)
    verifier = oidc(keys=keys)
    await verifier.verify_token(token)
    keys.content = public(RSA)
    await verifier.keys.refresh_keys()
    assert verifier.cached_result(token) is None
    with pytest.raises(TokenRejected):
        await verifier.verify_token(token)


async def test_keys_outlast_a_provider_that_is_away_for_a_while_and_no_longer() -> None:
    time, keys = Clock(0.0), Keys(EC)
    verifier = Oidc(PROVIDER, keys, lambda: NOW, keys_clock=time)
    await verifier.verify_token(token := made())
    keys.fails = OSError("no route")
    time.at += MAX_AGE - 1
    await verifier.keys.refresh_keys()
    assert verifier.cached_result(token)
    time.at += 1
    await verifier.keys.refresh_keys()
    assert verifier.cached_result(token) is None
    with pytest.raises(SiteUnavailable, match="no route"):
        await verifier.verify_token(token)


async def test_many_who_come_at_once_have_them_fetched_once() -> None:
    going_on = asyncio.Event()
    keys = Keys(EC)

    async def slow() -> bytes:
        await going_on.wait()
        return await keys()

    verifier = Oidc(PROVIDER, slow, lambda: NOW)
    verifying = [asyncio.ensure_future(verifier.verify_token(made(jti=str(number)))) for number in range(10)]
    await asyncio.sleep(0)
    going_on.set()
    assert [verified.user for verified in await asyncio.gather(*verifying)] == ["alice"] * 10
    assert keys.asked == 1


async def test_a_provider_that_hangs_holds_nobody_up_for_long() -> None:
    async def hang() -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(SiteUnavailable, match="TimeoutError"):
        await ProviderKeys(hang, lambda: None).for_id("ec")


def test_only_keys_are_taken_that_may_sign_and_are_strong_enough() -> None:
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
def test_what_is_no_set_of_keys_is_none(content: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        parse_signing_keys(content)


async def test_a_file_of_keys_will_do(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    verifier = Oidc(Provider(ISSUER, "koala", jwks_file=str(file), users={"5f1c": "alice"}), clock=lambda: NOW)
    with pytest.raises(SiteUnavailable, match=r"keys\.json"):
        await verifier.verify_token(made())
    file.write_bytes(public(EC))
    await verifier.keys.refresh_keys()
    assert (await verifier.verify_token(made())).user == "alice"


@asynccontextmanager
async def serving(answer: bytes) -> AsyncIterator[str]:
    """Something on the loopback address that answers so, whatever is asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/jwks"


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def test_keys_are_fetched_from_the_provider() -> None:
    async with serving(answer(public(EC))) as uri:
        verifier = Oidc(Provider(ISSUER, "koala", jwks_uri=uri, users={"5f1c": "alice"}), clock=lambda: NOW)
        assert (await verifier.verify_token(made())).user == "alice"


async def test_what_a_provider_answers_is_read_as_far_as_keys_go_and_not_looked_for_elsewhere() -> None:
    async with serving(answer(b"x" * (4 * MAX_SIZE))) as uri:
        assert MAX_SIZE < len(await fetch_content(uri)) < 2 * MAX_SIZE
    async with serving(answer(public(EC))) as uri, serving(answer(b"", "302 Found", f"Location: {uri}")) as elsewhere:
        with pytest.raises(ValueError, match="302"):
            await fetch_content(elsewhere)


ROLES = {"staff": Role.OPERATOR, "root": Role.ADMIN}


async def test_role_of_user_without_a_token_yet_is_the_highest_that_the_provider_gives() -> None:
    named = oidc(with_rule(users={"5f1c": "alice"}, role_claim="groups", roles=ROLES))
    assert [named.role_of(user) for user in ("alice", "bob")] == [Role.ADMIN, Role.USER]
    by_pattern = oidc(with_rule(pattern="(.+)", role_claim="groups", roles=ROLES))
    assert [by_pattern.role_of(user) for user in ("anne", "anne@north")] == [Role.ADMIN, Role.USER]
    assert oidc().role_of("alice") is Role.USER


async def test_role_of_user_is_the_highest_of_tokens_that_hold() -> None:
    clock = Clock(NOW)
    known = oidc(with_rule(users={"5f1c": "alice"}, role_claim="groups", roles=ROLES), clock=clock)
    await known.verify_token(made(groups="root"))
    await known.verify_token(made(groups="nothing", exp=int(NOW) + 900))
    assert known.role_of("alice") is Role.ADMIN
    clock.at += 301.0
    assert known.role_of("alice") is Role.ADMIN, "no other token was shown since"
    await known.verify_token(made(groups="staff", exp=int(NOW) + 900))
    assert known.role_of("alice") is Role.OPERATOR
