"""The server's OpenAPI description, /openapi.json: what every path takes and answers. Called by app.py.

Written by hand, beside routes.py: schemathesis compares it with what the server does (tests/serve/http/test_schema.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyprec import __version__
from anyprec.serve.http.protocol import LONGEST_S

Schema = dict[str, Any]

NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
BITS: Schema = {"anyOf": [{"type": "integer", "enum": [1, 2, 3, 4, 5, 6, 7, 8, 32]}, {"type": "string"}]}
MAYBE_NUMBER: Schema = {"type": ["number", "null"]}
DEADLINE: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_S * 1e3}

ERRORS = {
    400: "The request cannot be answered as it is",
    401: "A key is needed",
    403: "This key, or this client, may not do that",
    404: "There is no such model or path",
    413: "Too large",
    415: "Not a type that is taken",
    429: "This client has more than its share of the queue",
    503: "Overloaded, stopping, or not loaded; Retry-After says when to try again",
    504: "Its deadline passed while it waited",
}


def describe(names: Sequence[str] | None, keys: bool, control: bool) -> Schema:
    """names: of the models, None: not for this client; keys: whether callers need one; control: whether setting
    anything needs one of its own."""
    known = {} if names is None else {"enum": [*names]}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", **known}}
    paths = {
        "/v2": {"get": operation("The server", "Server", (), "serverMetadata")},
        "/v2/health/live": {"get": operation("Whether the process lives", "Health", (), "live", key=False)},
        "/v2/health/ready": {"get": operation("Whether every model is loaded", "Health", (503,), "ready", key=False)},
        "/v2/models/stats": {"get": operation("Counts of all models", "Stats", (), "allStats")},
        "/v2/repository/index": {
            "get": operation("The models", "Index", (), "index"),
            "post": {
                **operation("The models", "Index", (400, 413, 415, 503), "indexPost"),
                "requestBody": json_body(record({}, ready={"type": "boolean"}), required=False),
            },
        },
        "/metrics": {"get": text_operation("Counts for Prometheus", "metrics")},
        "/openapi.json": {"get": operation("This description", "Any", (), "openapi", key=False)},
        "/": {"get": page_operation()},
        **model_paths(name, control),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "anyprec serve",
            "version": __version__,
            "description": "Open Inference Protocol v2, with the bit-width as the knob under load.",
        },
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "control": {"type": "http", "scheme": "bearer"},
            },
        },
        "security": [{"key": []}] if keys else [],
    }


def model_paths(name: Schema, needs_key: bool) -> dict[str, Schema]:
    version = {"name": "version", "in": "path", "required": True, "schema": {"type": "string", "enum": ["1"]}}
    gone = (404, 503)
    query = [
        parameter("bits", {"type": "string"}, 'a width, a mixed profile, or "all"'),
        parameter("min_bits", {"type": "integer", "enum": [1, 2, 3, 4, 5, 6, 7, 8, 32]}, "no narrower width"),
        parameter("deadline_ms", DEADLINE, "instead of the server's target"),
        parameter("top", {"type": "integer", "minimum": 1, "maximum": 1000}, "how many labels"),
    ]
    infer = operation("Run a batch", "InferResponse", (400, 404, 413, 415, 429, 503, 504), "infer")
    infer["responses"]["200"]["content"]["application/octet-stream"] = {"schema": {}}
    infer["requestBody"] = {
        "required": True,
        "content": {
            "application/json": {"schema": ref("InferRequest")},
            "application/octet-stream": {
                "schema": {"type": "string", "format": "binary"},
            },
        },
    }
    infer["parameters"] = [
        {
            "name": "Inference-Header-Content-Length",
            "in": "header",
            "required": False,
            "description": "length of the JSON, where binary tensors follow it; 0: the body is the input, raw",
            "schema": {"type": "integer", "minimum": 0},
        }
    ]
    paths: dict[str, Schema] = {
        "": {"get": operation("Inputs, outputs, levels", "Model", gone, "model")},
        "/ready": {"get": operation("Whether it is loaded", "Health", gone, "modelReady")},
        "/config": {"get": operation("Triton's form of the metadata", "Any", gone, "config")},
        "/stats": {"get": operation("Counts, times, the latency table", "Stats", (404,), "stats")},
        "/infer": {"post": infer},
    }
    found = {
        f"/v2/models/{{name}}{prefix}{path}": {
            method: named(one, f"{one['operationId']}{'Version' if prefix else ''}", [name, *extra])
            for method, one in methods.items()
        }
        for prefix, extra in (("", []), ("/versions/{version}", [version]))
        for path, methods in paths.items()
    }
    classify = operation(
        "Labels of a posted JPEG or PNG", "Classified", (400, 404, 413, 415, 429, 503, 504), "classify"
    )
    image = {"schema": {"type": "string", "format": "binary"}}
    classify["requestBody"] = {"required": True, "content": {"image/jpeg": image, "image/png": image}}
    classify["parameters"] = query
    seconds = parameter("seconds", {"type": "integer", "minimum": 1, "maximum": 299}, "how many, default 60")
    recent = operation("The last seconds, for the page", "Live", (400, 404), "recent")
    recent["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    window = parameter("window", {"type": "integer", "minimum": 1, "maximum": 299}, "seconds summed up, default 10")
    recent["parameters"] = [seconds, window]
    recent["responses"]["503"] = response(ERRORS[503], "Error")
    control = operation("Hold a level, or free it", "Precision", (400, 403, 404, 413, 415, 503), "setPrecision")
    control["requestBody"] = json_body(ref("SetPrecision"))
    load = operation("Open its file anew", "State", (400, 403, 404, 413, 415, 503), "load")
    load["requestBody"] = json_body({"type": "object", "additionalProperties": False}, required=False)
    unload = operation("Stop serving it", "State", (400, 403, 404, 413, 415, 503), "unload")
    unload["requestBody"] = json_body({"type": "object"}, required=False)
    for one in (control, load, unload):
        one["responses"]["401"] = response(ERRORS[401], "Error")
        if needs_key:
            one["security"] = [{"control": []}]
    found["/v2/models/{name}/classify"] = {"post": named(classify, "classify", [name])}
    found["/v2/models/{name}/live"] = {"get": named(recent, "recent", [name])}
    found["/v2/models/{name}/precision"] = {
        "get": named(operation("How the level is chosen", "Precision", gone, "precision"), "precision", [name]),
        "post": named(control, "setPrecision", [name]),
    }
    found["/v2/repository/models/{name}/load"] = {"post": named(load, "load", [name])}
    found["/v2/repository/models/{name}/unload"] = {"post": named(unload, "unload", [name])}
    return found


# --- parts ---


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def named(one: Schema, id: str, parameters: list[Schema]) -> Schema:
    return {**one, "operationId": id, "parameters": [*parameters, *one.get("parameters", [])]}


def parameter(name: str, schema: Schema, about: str) -> Schema:
    return {"name": name, "in": "query", "required": False, "description": about, "schema": schema}


def response(about: str, schema: str) -> Schema:
    return {"description": about, "content": {"application/json": {"schema": ref(schema)}}}


def operation(about: str, schema: str, errors: tuple[int, ...], id: str, key: bool = True) -> Schema:
    responses = {"200": response(about, schema)}
    for status in (*errors, *((401,) if key else ())):
        responses[str(status)] = response(ERRORS[status], "Error")
    found: Schema = {"summary": about, "operationId": id, "responses": responses}
    if not key:
        found["security"] = []
    return found


def text_operation(about: str, id: str) -> Schema:
    found = operation(about, "Any", (), id)
    found["responses"]["200"] = {"description": about, "content": {"text/plain": {"schema": STRING}}}
    return found


def page_operation() -> Schema:
    found = operation("The page", "Any", (), "page", key=False)
    found["responses"]["200"] = {"description": "The page", "content": {"text/html": {"schema": STRING}}}
    found["responses"]["304"] = {"description": "As it was"}
    return found


def json_body(schema: Schema, required: bool = True) -> Schema:
    return {"required": required, "content": {"application/json": {"schema": schema}}}


def record(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def array(items: Schema, **rest: Any) -> Schema:
    return {"type": "array", "items": items, **rest}


SIZES = array({"type": "integer", "minimum": 1}, minItems=1, maxItems=4)
TENSOR = record({"name": STRING, "datatype": STRING, "shape": array(WHOLE)})
DATA: Schema = {"type": "array", "items": {"anyOf": [NUMBER, {"type": "array"}]}}
LEVEL = record(
    {"name": STRING, "accuracy": MAYBE_NUMBER, "ms": NUMBER, "share": MAYBE_NUMBER, "front": {"type": "boolean"}},
    bits=array(array(WHOLE)),
)
SCHEMAS: dict[str, Schema] = {
    "Any": {},
    "Error": record({"error": STRING}, retry_after_ms=NUMBER),
    "Health": {"type": "object"},
    "Server": record({"name": STRING, "version": STRING, "extensions": array(STRING)}),
    "Model": record(
        {"name": STRING, "versions": array(STRING), "platform": STRING, "inputs": array(TENSOR)},
        outputs=array(TENSOR),
        parameters={"type": "object"},
    ),
    "Index": array(record({"name": STRING, "version": STRING, "state": STRING, "reason": STRING})),
    "State": record({"name": STRING, "state": STRING}),
    "Stats": record({"model_stats": array({"type": "object"})}),
    "InferRequest": record(
        {
            "inputs": array(
                record(
                    {
                        "name": {"type": "string", "enum": ["input"]},
                        "datatype": {"type": "string", "enum": ["UINT8", "FP32", "FP16", "FP64"]},
                        "shape": SIZES,
                        "data": DATA,
                    }
                ),
                minItems=1,
                maxItems=1,
            )
        },
        id={"type": "string", "maxLength": 256},
        outputs=array(record({"name": STRING}, parameters={"type": "object"})),
        parameters={
            "type": "object",
            "properties": {
                "bits": BITS,
                "min_bits": {"type": "integer", "enum": [1, 2, 3, 4, 5, 6, 7, 8, 32]},
                "deadline_ms": DEADLINE,
                "binary_data_output": {"type": "boolean"},
            },
        },
    ),
    "InferResponse": record(
        {
            "model_name": STRING,
            "model_version": STRING,
            "outputs": array(TENSOR),
            "parameters": record(
                {"bits": BITS, "latency_ms": NUMBER, "queue_ms": NUMBER, "run_ms": NUMBER, "batch": WHOLE},
                stages=array(BITS),
            ),
        },
        id=STRING,
    ),
    "Classified": record(
        {
            "model_name": STRING,
            "model_version": STRING,
            "results": array(
                record(
                    {"bits": BITS, "labels": array({"type": "object"}), "run_ms": NUMBER, "latency_ms": NUMBER},
                    accuracy=MAYBE_NUMBER,
                    stages=array(BITS),
                )
            ),
        }
    ),
    "Live": record(
        {
            "model_name": STRING,
            "state": STRING,
            "time": WHOLE,
            "target_ms": NUMBER,
            "condition": record({"level": STRING, "words": STRING, "overloaded": {"type": "boolean"}}),
            "window": {"type": "object"},
            "seconds": array({"type": "object"}),
            "levels": array(LEVEL),
            "layers": array(STRING),
        },
        last_level={"anyOf": [STRING, {"type": "null"}]},
    ),
    "Precision": record({"policy": STRING, "bits": {"anyOf": [BITS, {"type": "null"}]}}),
    "SetPrecision": {
        "anyOf": [
            record({"bits": BITS}) | {"additionalProperties": False},
            record({"policy": {"type": "string", "enum": ["adaptive", "accuracy"]}}) | {"additionalProperties": False},
        ]
    },
}
