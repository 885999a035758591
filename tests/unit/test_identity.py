"""Identity keys: encodings that libp2p agrees with, signatures, claims, file modes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

import swarm.net.identity
from peer.claims import led_by, local_trainer
from swarm.config import canonical_bytes, parse_toml, with_trainers
from swarm.config_text import default_toml
from swarm.errors import ConfigError, InUseError, StorageError
from swarm.net.hivemind_quiet import import_hivemind
from swarm.net.identity import (
    Identity,
    claim_identity,
    claim_identity_file,
    is_peer_id,
    load_identity,
    peer_id_of,
    verify,
)


@pytest.fixture(params=["ed25519", "rsa"])
def identity(request: pytest.FixtureRequest, tmp_path: Path) -> Identity:
    path = tmp_path / "own.key"
    if request.param == "rsa":
        import_hivemind()
        from hivemind.p2p import P2P, PeerID

        P2P.generate_identity(str(path))
        assert load_identity(path).peer_id == PeerID.from_identity(path.read_bytes()).to_base58()
    return load_identity(path)


def test_signatures(identity: Identity, tmp_path: Path) -> None:
    signature = identity.sign("purpose", b"data")
    own = (identity.peer_id, identity.public_key)
    assert is_peer_id(identity.peer_id)
    assert peer_id_of(identity.public_key) == identity.peer_id
    assert verify(*own, "purpose", b"data", signature)
    assert not verify(*own, "purpose", b"datb", signature)
    assert not verify(*own, "other", b"data", signature)
    assert not verify(*own, "purpose", b"data", signature[:-1])
    assert not verify(*own, "purpose", b"data", b"")
    other = load_identity(tmp_path / "other.key")
    assert not verify(other.peer_id, identity.public_key, "purpose", b"data", signature)
    assert not verify(*(other.peer_id, other.public_key), "purpose", b"data", signature)
    for public_key in (b"", b"\x08", identity.public_key[:-1], identity.public_key + b"x"):
        assert not verify(peer_id_of(public_key), public_key, "purpose", b"data", signature)


def test_a_key_that_takes_long_to_check_is_nobodys() -> None:
    """Of a stranger who signs little and has others compute much: e as long as the key, but of its
    own choice, so that the signature is right."""
    phi_of = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_numbers()
    phi = (phi_of.p - 1) * (phi_of.q - 1)
    d = 65537  # short for who signs
    e = pow(d, -1, phi)
    numbers = rsa.RSAPrivateNumbers(
        *(phi_of.p, phi_of.q, d),
        dmp1=d % (phi_of.p - 1),
        dmq1=d % (phi_of.q - 1),
        iqmp=phi_of.iqmp,
        public_numbers=rsa.RSAPublicNumbers(e, phi_of.p * phi_of.q),
    )
    key = numbers.private_key()
    data = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    public_key = swarm.net.identity._encode(0, data)
    message = swarm.net.identity._message("purpose", b"data")
    signature = key.sign(message, padding.PKCS1v15(), hashes.SHA256())
    key.public_key().verify(signature, message, padding.PKCS1v15(), hashes.SHA256())
    assert not verify(peer_id_of(public_key), public_key, "purpose", b"data", signature)


def test_key_file_is_private_and_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    first = load_identity(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert load_identity(path).peer_id == first.peer_id
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]


def test_two_peers_of_one_machine_get_two_identities(tmp_path: Path) -> None:
    first, second = claim_identity(tmp_path), claim_identity(tmp_path)
    assert [first.path.name, second.path.name] == ["identity.key", "identity-2.key"]
    assert first.peer_id != second.peer_id
    with pytest.raises(StorageError, match="in use"):
        claim_identity_file(first.path)
    script = (
        "import sys; from swarm.net.identity import claim_identity;"
        "print(claim_identity(sys.argv[1]).path.name)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "identity-3.key"
    peer_id = first.peer_id
    first.release()
    first.release()
    again = claim_identity(tmp_path)
    assert again.peer_id == peer_id
    again.release()
    second.release()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x08\x01\x12", b"not a key at all", b"\x08\x00\x12\x01x", bytes(2**20)],
    ids=["empty", "cut", "text", "damaged", "large"],
)
def test_bad_file_is_one_line_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    path.chmod(0o644)
    with pytest.raises(StorageError, match="not a libp2p private key"):
        load_identity(path)
    assert path.stat().st_mode & 0o777 == 0o644
    assert path.read_bytes() == content
    with pytest.raises(StorageError, match="cannot read or write"):
        load_identity(tmp_path)


def test_a_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="by XDG_DATA_HOME or the flag"):
        claim_identity(tmp_path / "file")

    def load_and_lose(path: Path) -> Identity:
        found = load_identity(path)
        path.unlink()
        return found

    monkeypatch.setattr(swarm.net.identity, "load_identity", load_and_lose)
    with pytest.raises(StorageError, match=r"no such file.* by XDG_DATA_HOME"):
        claim_identity(tmp_path / "home")


def test_swarms_started_at_once_on_one_machine_have_trainers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is still checking its data, and leads nothing yet, when the second chooses."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    config = parse_toml(default_toml())
    first, second = local_trainer(config), local_trainer(config)
    try:
        assert first.peer_id != second.peer_id
        named = with_trainers(config, [second.peer_id])
        with pytest.raises(InUseError, match=rf"leads with .* {second.peer_id} - stop it"):
            local_trainer(named)
        second.release()
        second = local_trainer(named)
        assert named.run.trainers == (second.peer_id,)
        spare = tmp_path / "swarm-parallel" / "trainer" / "identity-3.key"
        spare.write_text("not a key")
        second.release()
        second = local_trainer(named)
        with pytest.raises(StorageError, match=r"identity-3\.key is not a libp2p private key"):
            local_trainer(with_trainers(config, ["another"]))
        spare.unlink()
    finally:
        first.release()
        second.release()
    with pytest.raises(ConfigError, match=rf"\({first.peer_id}\) is not one of the run's trainers"):
        local_trainer(with_trainers(config, ["another"]))
    with pytest.raises(ConfigError, match=r"lists 2, .* one trainer - leave run\.trainers out"):
        local_trainer(with_trainers(config, [first.peer_id, "another"]))
    several = canonical_bytes(with_trainers(config, [first.peer_id, "another"]))
    (tmp_path / "run.json").write_bytes(several)
    # Not "leave run.trainers out": the run that is resumed would still name them.
    with pytest.raises(ConfigError, match=r"lists 2, .* one trainer - lead from each .* own alone"):
        led_by(tmp_path)
