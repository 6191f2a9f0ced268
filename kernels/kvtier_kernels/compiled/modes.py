"""Emits the way into a compiled kernel: how the thread rounds is set to IEEE 754's defaults, and put back.

Why it exists: a thread may round otherwise or flush small numbers to 0, because the program that embeds this
one asked for it or loaded a library that did, and then a chunk that such a thread attends would have other
bits than its neighbour's. It must not know what is computed.
"""

from __future__ import annotations

from llvmlite import ir

from kvtier_kernels.compiled.emit import I32, I64, Value

_DEFAULTS = 0x1F80
"""Of MXCSR: to nearest, nothing flushed, no traps."""


def emit_guarded(module: ir.Module, function: Value) -> str:
    """`<name>_guarded(words)`: calls the function with these modes; its name."""
    # Inlined, its operations could be moved across the change.
    function.attributes.add("noinline")
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType()])
    save, load = (_declared(module, f"llvm.x86.sse.{name}mxcsr", kind) for name in ("st", "ld"))
    guarded = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64]), f"{function.name}_guarded")
    b = ir.IRBuilder(guarded.append_basic_block("entry"))
    before, during = b.alloca(I32), b.alloca(I32)
    b.call(save, [before])
    b.store(ir.Constant(I32, _DEFAULTS), during)
    b.call(load, [during])
    b.call(function, list(guarded.args))
    b.call(load, [before])
    b.ret_void()
    return str(guarded.name)


def _declared(module: ir.Module, name: str, kind: ir.FunctionType) -> Value:
    found = module.globals.get(name)
    return found if found is not None else ir.Function(module, kind, name)
