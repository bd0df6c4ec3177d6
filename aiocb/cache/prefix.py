"""Finds blocks whose KV is already there: `PrefixIndex`, from the hash of a full block to the physical one.

The hash of block i covers the salt, the weights version, the content of the adapter, the kind of keys and *every* token
up to the end of block i, so equal hashes mean an equal history. It is a 256-bit BLAKE2b (Python's own `hash` would let
one tenant forge another's prefix), and a hit is verified against the block's own tokens on top of that.

    root = H(version, kind, adapter, salt)    d0 = H(root, tokens of block 0)    d1 = H(d0, tokens of block 1)    ...
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

from aiocb.cache.blocks import BlockPool

__all__ = ["PrefixIndex", "block_payload", "chain_hash", "root_hash"]

_HASH_BYTES = 32


def root_hash(salt: str | bytes | None, version: int, kind: int = 0, adapter: str | None = None) -> bytes:
    """Digest of the empty prefix: what separates tenants (salt), weights (version, adapter), and kinds of keys."""
    if salt is None:
        data = b"n"
    elif isinstance(salt, str):
        data = b"s" + salt.encode("utf-8", "surrogatepass")
    else:
        data = b"b" + salt
    if adapter is not None:
        name = adapter.encode()
        data = b"a" + len(name).to_bytes(8, "little") + name + data
    return blake2b(version.to_bytes(8, "little") + kind.to_bytes(8, "little") + data, digest_size=_HASH_BYTES).digest()


def block_payload(tokens: Sequence[int]) -> bytes:
    """The tokens of one block as bytes: what is hashed, and what a hit is verified against."""
    return pack(f"{len(tokens)}q", *tokens)


def chain_hash(parent: bytes, payload: bytes) -> bytes:
    """Digest of the prefix that ends with this block."""
    return blake2b(parent + payload, digest_size=_HASH_BYTES).digest()


class PrefixIndex:
    """The published blocks of one group. A free block stays published, and hittable, until it is reused.

    Args:
        pool: of the same group; the index reads reference counts and changes nothing in it.
    """

    __slots__ = ("_blocks", "_contents", "_pool")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[bytes, int] = {}
        self._contents: list[tuple[bytes, bytes] | None] = [None] * pool.num_blocks  # hash and payload

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, block_hash: bytes, tokens: Sequence[int]) -> int | None:
        """Return the block that holds exactly this prefix's last page, or None.

        Args:
            block_hash: of the prefix up to and including the block.
            tokens: of the block itself.
        """
        block = self._blocks.get(block_hash)
        if block is None or self._contents[block] != (block_hash, block_payload(tokens)):
            return None
        return block

    def peek(self, block_hash: bytes) -> int | None:
        """As `find`, without verification: only for hashes that `find` has just verified."""
        return self._blocks.get(block_hash)

    def is_published(self, block: int) -> bool:
        """True when the block's contents can be hit."""
        return self._contents[block] is not None

    def publish(self, block: int, block_hash: bytes, payload: bytes) -> None:
        """Make a full block findable; call it only once its KV has been written.

        When another block has the same contents, the one that is in use wins: a free one may be evicted any moment.

        Args:
            block: physical block.
            block_hash: of the prefix up to and including it.
            payload: `block_payload` of its own tokens.
        """
        if self._contents[block] is not None:
            return
        other = self._blocks.get(block_hash)
        if other is not None:
            if self._pool.num_references(other):
                return
            self.withdraw(other)
        self._blocks[block_hash] = block
        self._contents[block] = block_hash, payload

    def withdraw(self, block: int) -> None:
        """Forget a block whose contents are about to be overwritten; no-op when it was not published."""
        contents, self._contents[block] = self._contents[block], None
        if contents is not None:
            del self._blocks[contents[0]]

    def clear(self) -> None:
        """Forget every block."""
        for block in list(self._blocks.values()):
            self.withdraw(block)

    def check_invariants(self) -> None:
        """Walk everything.

        Raises:
            AssertionError: the two directions of the index disagree.
        """
        backward = {(contents[0], block) for block, contents in enumerate(self._contents) if contents is not None}
        assert set(self._blocks.items()) == backward, "hashes and blocks are not one to one"
        assert self._contents[0] is None, "the null block is published"

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._blocks)} blocks>"
