# SPDX-License-Identifier: Apache-2.0
"""A server that speaks SGLang's HTTP protocol and draws with a real model, one token after the other, without a cache.

It stands in for SGLang, which generates nothing on a CPU: what it is asked and answers is what SGLang's own server is,
as far as the engine uses it.
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

KINDS = ("weights", "kv_cache")

CACHE_TOKENS = 1000
READS_BACK = ("LlamaForCausalLM", "MistralForCausalLM")
"""Of the architectures whose tensors SGLang 0.5.23 reads by name, those that the tests have."""


class StandIn:
    """The model behind the server. An update does not reach the weights called ``deaf``, though it is said to have."""

    def __init__(self, path):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.lock, self.aborted, self.there = threading.Lock(), set(), set(KINDS)
        self.deaf, self.said = (), []  # ... and every path that was asked for
        self.updates, self.weight_version = [], "default"  # bodies of updates; SGLang's name for the initial weights
        self.context = self.model.config.max_position_embeddings
        self.longest = min(self.context, CACHE_TOKENS) - 1

    def health(self, body):
        return None

    def server_info(self, body):
        return {"max_total_num_tokens": CACHE_TOKENS, "max_req_input_len": self.longest - 5}

    def generate(self, body):
        how, tokens = body["sampling_params"], []
        length = len(body["input_ids"])
        if length + how["max_new_tokens"] > self.context:
            raise ValueError(f"Requested token count exceeds the model's maximum context length of {self.context}")
        if length >= self.longest - 5:
            raise ValueError(f"Input length ({length}) exceeds the maximum allowed length ({self.longest - 5} tokens).")
        how["max_new_tokens"] = min(how["max_new_tokens"], self.longest - length - 1)
        while True:
            with self.lock:
                assert self.there == set(KINDS), "asked to generate without weights or cache"
                tokens.append(self._draw(body["input_ids"] + [token for _, token, _ in tokens], how))
                reason = self._reason(body["rid"], tokens, how)
            if reason:
                meta = {"id": body["rid"], "finish_reason": reason, "output_token_logprobs": tokens}
                meta["weight_version"] = self.weight_version
                return {"text": "", "output_ids": [token for _, token, _ in tokens], "meta_info": meta}

    def abort_request(self, body):
        self.aborted.add(body["rid"])

    def update_weights_from_disk(self, body):
        self.updates.append(body)
        with self.lock, torch.no_grad():
            tensors = load_file(f"{body['model_path']}/model.safetensors")
            own = dict(self.model.named_parameters())
            if tensors.keys() - own.keys():
                return {"success": False, "message": "unknown names"}
            for name, tensor in tensors.items():
                if name not in self.deaf:
                    own[name].copy_(tensor)
            self.weight_version = body["weight_version"]
        return {"success": True, "message": "fine", "num_paused_requests": 0}

    def get_weights_by_name(self, body):
        """Return the rows of queries, keys and values where SGLang expects them in the merged projection."""
        config, own, name = self.model.config, dict(self.model.named_parameters()), body["name"]
        if config.architectures[0] not in READS_BACK or name not in own:
            raise ValueError("Get parameter by name failed")
        tensor, part = own[name], next((part for part in "qkv" if f".{part}_proj." in name), "")
        if part:
            merged = torch.cat([own[name.replace(f".{part}_proj.", f".{other}_proj.")] for other in "qkv"])
            counts = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
            sizes = [count * (config.hidden_size // config.num_attention_heads) for count in counts]
            tensor = merged.narrow(0, sum(sizes[: "qkv".index(part)]), sizes["qkv".index(part)])
        return tensor.detach().float().numpy().tolist()[: body["truncate_size"]]

    @torch.no_grad()
    def release_memory_occupation(self, body):
        self.there -= set(body["tags"])
        if "weights" in body["tags"]:
            for parameter in self.model.parameters():
                parameter.fill_(torch.nan)

    def resume_memory_occupation(self, body):
        self.there |= set(body["tags"])

    @torch.no_grad()
    def _draw(self, ids, how):
        logits = self.model(torch.tensor([ids])).logits[0, -1].double()
        logprobs = torch.log_softmax(logits / (how["temperature"] or 1.0), dim=-1)
        if how["temperature"] == 0:
            token = int(logits.argmax())
        else:
            ranked, order = logprobs.exp().sort(descending=True)
            in_nucleus = ranked.cumsum(0) - ranked < how["top_p"]
            in_nucleus[how["top_k"] if how["top_k"] > 0 else len(in_nucleus) :] = False
            cumulative = (ranked * in_nucleus).cumsum(0)
            number = hashlib.blake2b(f"{how['sampling_seed']}/{len(ids)}".encode(), digest_size=6).digest()
            uniform = int.from_bytes(number, "little") / 2**48
            place = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
            token = int(order[min(place, len(order) - 1)])
        return [float(logprobs[token]), token, None]

    def _reason(self, rid, entries, how):
        tokens = [token for _, token, _ in entries]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        if not how["ignore_eos"] and tokens[-1] in how["stop_token_ids"]:
            return {"type": "stop", "matched": tokens[-1]}
        if any(stop in text for stop in how["stop"]):
            return {"type": "stop", "matched": next(stop for stop in how["stop"] if stop in text)}
        if len(tokens) == how["max_new_tokens"]:
            return {"type": "length", "length": len(tokens)}
        if rid in self.aborted:
            return {"type": "abort", "message": "aborted by the client"}
        return None


def serve(path, port=0):
    """Start a server for the model in the folder ``path``; returns the stand-in, its URL and how to end it."""
    stand_in = StandIn(path)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            stand_in.said.append(self.path)
            try:
                answer = getattr(stand_in, self.path.strip("/"))(body)
                status = 400 if isinstance(answer, dict) and answer.get("success") is False else 200
            except Exception as error:  # noqa: BLE001 - a server answers whatever happens
                answer, status = {"error": {"message": repr(error)}}, 400
            data = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()

    def close():
        server.shutdown()
        server.server_close()
        thread.join(10.0)

    return stand_in, f"http://127.0.0.1:{server.server_port}", close
