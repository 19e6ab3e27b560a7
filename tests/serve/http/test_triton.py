"""NVIDIA's tritonclient, unmodified, against the server: what its users know works."""

import numpy as np
import pytest
from serving import expected, images, running

triton = pytest.importorskip("tritonclient.http")
from tritonclient.utils import InferenceServerException  # noqa: E402


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as found:
        yield found


def given(x, binary=True):
    datatype = {"uint8": "UINT8", "float32": "FP32"}[str(x.dtype)]
    found = triton.InferInput("input", x.shape, datatype)
    found.set_data_from_numpy(x, binary_data=binary)
    return [found]


def test_health_and_metadata(client):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("net") and client.is_model_ready("net", "1")
    assert not client.is_model_ready("other") and not client.is_model_ready("net", "2")
    assert client.get_server_metadata()["name"] == "anyprec"
    found = client.get_model_metadata("net")
    assert found["inputs"] == [{"name": "input", "datatype": "UINT8", "shape": [-1, 3, 8, 8]}]
    assert found["outputs"] == [{"name": "head", "datatype": "FP32", "shape": [-1, 4]}]
    assert client.get_model_config("net")["input"][0]["data_type"] == "TYPE_UINT8"
    assert client.get_model_repository_index()[0]["state"] == "READY"


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_infer(client, model_path, binary_in, binary_out, dtype):
    x = images(2).astype(dtype)
    outputs = None if binary_out is None else [triton.InferRequestedOutput("head", binary_data=binary_out)]
    found = client.infer("net", given(x, binary_in), outputs=outputs, request_id="r1", parameters={"bits": 2})
    np.testing.assert_array_equal(found.as_numpy("head"), expected(model_path, x, 2), strict=True)
    record = found.get_response()
    assert record["id"] == "r1" and record["model_name"] == "net" and record["parameters"]["bits"] == 2


def test_parameters(client):
    x = images(1)
    for parameters, allowed in (({"bits": 8}, {8}), ({"min_bits": 4}, {4, 8}), ({"deadline_ms": 5000.0}, {1, 2, 4, 8})):
        found = client.infer("net", given(x), parameters=parameters).get_response()["parameters"]
        assert found["bits"] in allowed and found["latency_ms"] >= found["queue_ms"] >= 0 and found["batch"] >= 1
    client.infer("net", given(x), timeout=5_000_000, priority=1)
    with pytest.raises(InferenceServerException, match="bits='3' is not in this model"):
        client.infer("net", given(x), parameters={"bits": 3})


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressed_requests(client, model_path, compression):
    x = images(4)
    found = client.infer(
        "net", given(x), parameters={"bits": 4}, request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )  # fmt: skip
    np.testing.assert_array_equal(found.as_numpy("head"), expected(model_path, x, 4))


@pytest.mark.parametrize("binary", [True, False])
def test_classification(client, model_path, binary):
    x = images(2)
    wanted = [triton.InferRequestedOutput("head", binary_data=binary, class_count=2)]
    found = client.infer("net", given(x), outputs=wanted, parameters={"bits": 8}).as_numpy("head")
    assert found.shape == (2, 2)
    first = found[0][0].decode() if isinstance(found[0][0], bytes) else found[0][0]
    score, number, label = first.split(":")
    y = expected(model_path, x, 8)[0]
    assert int(number) == y.argmax() and float(score) == pytest.approx(y.max(), rel=1e-5)
    assert label in ("cat", "dog", "bird", "ship")


def test_asynchronous_requests(server, model_path):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=4) as client:
        batches = [images(1, seed=seed) for seed in range(20)]
        waiting = [client.async_infer("net", given(x), parameters={"bits": 8}) for x in batches]
        for x, one in zip(batches, waiting, strict=True):
            np.testing.assert_array_equal(one.get_result().as_numpy("head"), expected(model_path, x, 8))


def test_errors_are_the_clients_own(client):
    for model, x in (("other", images(1)), ("net", images(1, size=9)), ("net", images(40))):
        with pytest.raises(InferenceServerException) as error:
            client.infer(model, given(x))
        assert error.value.status() in ("404", "400") and "Traceback" not in error.value.message()


def test_statistics(client):
    before = client.get_inference_statistics("net")["model_stats"][0]
    client.infer("net", given(images(3)))
    after = client.get_inference_statistics("net")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 1
    assert client.get_inference_statistics()["model_stats"][0]["name"] == "net"


def test_repository_control(model_path):
    with running({"net": model_path}) as server, triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        client.unload_model("net")
        assert not client.is_model_ready("net") and not client.is_server_ready()
        client.load_model("net")
        assert client.is_model_ready("net")
        with pytest.raises(InferenceServerException, match="parameters are not taken"):
            client.load_model("net", config="{}")
