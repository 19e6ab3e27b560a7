"""Keys: files, environment, names, and that every one is compared."""

import hmac

import pytest

from anyprec.errors import ServeError
from anyprec.serve.http.keys import Keys, is_readable_by_all, read_keys

ONE, TWO, BOSS = "a" * 16, "b" * 20, "c" * 24


def test_files_and_environment(tmp_path):
    api, control = tmp_path / "api", tmp_path / "control"
    api.write_text(f"# two clients\n\nweb: {ONE}\n{TWO}\n")
    control.write_text(BOSS)
    keys = read_keys(str(api), str(control), {"ANYPREC_API_KEYS": "d" * 16 + ", " + "e" * 16})
    assert [name for name, _ in keys.api] == ["web", "api-2", "api-3", "api-4"]
    assert keys.caller(ONE.encode()).name == "web" and not keys.caller(ONE.encode()).control
    assert keys.caller(b"e" * 16).name == "api-4"
    assert keys.caller(BOSS.encode()).control
    assert keys.caller(b"nope").name is None and keys.caller(None).name is None
    assert ONE not in repr(keys)
    api.write_text(f"other: {TWO}")
    again = keys.again({})
    assert again.caller(ONE.encode()).name is None and again.caller(TWO.encode()).name == "other"


def test_no_keys():
    assert read_keys(environ={}) == Keys()
    assert Keys().caller(b"anything").name is None


@pytest.mark.parametrize(
    "text, says", [("short", "16 or more"), ("x" * 8 + " " + "y" * 8, "16 or more"), ("", "no key")]
)
def test_mistakes(tmp_path, text, says):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ServeError, match=says) as error:
        read_keys(str(tmp_path / "keys"), None, {})
    assert not text or text not in str(error.value).replace("keys", "")  # a key never stands in a message
    with pytest.raises(ServeError, match="cannot be read"):
        read_keys(None, str(tmp_path / "missing"), {})


def test_every_key_is_compared_in_constant_time(monkeypatch):
    keys = read_keys(environ={"ANYPREC_API_KEYS": f"{ONE},{TWO}", "ANYPREC_CONTROL_KEYS": BOSS})
    compared = []
    honest = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(b) or honest(a, b))
    for key in (ONE, BOSS, "wrong"):
        keys.caller(key.encode())
    assert len(compared) == 9 and all(len(digest) == 32 for digest in compared)


def test_readable_by_all(tmp_path):
    path = tmp_path / "keys"
    path.write_text(ONE)
    path.chmod(0o600)
    assert not is_readable_by_all(str(path))
    path.chmod(0o644)
    assert is_readable_by_all(str(path))
