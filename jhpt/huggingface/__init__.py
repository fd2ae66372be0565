"""Hugging Face's folders: `config.json`, weights in safetensors files, and the tokenizer's files beside them.

architectures   which architectures there are: settings in and out, and their tensors
gpt2, llama, bert   one family of them each
tensors         a parameter here is made of these tensors there, and back
files           safetensors files, read by memory mapping and written shard by shard
folder          a folder as a source of parameters
"""
