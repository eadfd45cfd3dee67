"""Items and blocks together, through any order of events that links can bring."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, List, Optional, Tuple

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mapsage.extras.streaming.remote.blocks import BlockPool
from mapsage.extras.streaming.remote.inbox import Inbox
from mapsage.extras.streaming.remote.state import Progress, State
from mapsage.extras.streaming.wire.header import Header, Kind
from mapsage.extras.streaming.wire.payload import pack_levels

CPU = torch.device('cpu')
BLOCKS, SIZE = 5, 16
NOTHING = torch.empty(0, dtype=torch.uint8)
# which state may follow which, besides itself: the picture of Progress
FOLLOWS = {
    State.NEW: {State.RESERVED, State.READY, State.FAILED},
    State.RESERVED: {State.FILLING, State.PARTIAL, State.READY, State.NEW, State.FAILED},
    State.FILLING: {State.PARTIAL, State.READY, State.NEW, State.FAILED},
    # empty blocks are given again at once, so PARTIAL may not be seen between two credits
    State.PARTIAL: {State.RESUMING, State.NEW, State.FAILED},
    State.RESUMING: {State.PARTIAL, State.READY, State.NEW, State.FAILED},
    State.READY: {State.CONSUMED},
    State.CONSUMED: set(),
    State.FAILED: set(),
}
FOLLOWS[State.FILLING].add(State.RESUMING)
FOLLOWS[State.RESERVED].add(State.RESUMING)


def features(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    size = int(images.flatten()[0]) if images.numel() else 0
    return (torch.arange(size, dtype=torch.uint8).reshape(1, 1, 1, size) + 3,)


class Wire:
    """A link whose other end is the test: what is sent is kept, in order."""

    def __init__(self, number: int) -> None:
        self.peer, self.alive, self.reopens = f'encoder {number}', True, True
        self.sent: List[Tuple[Header, Optional[torch.Tensor]]] = []

    def start(self, receiver: Inbox) -> None:
        pass

    def close(self, timeout: float) -> None:
        self.alive = False

    def send(self, header: Header, payload: Optional[torch.Tensor] = None) -> None:
        if self.alive:
            self.sent.append((header, payload))


class Transfers(RuleBasedStateMachine):
    """An inbox with two encoders that do anything at any time, also what they should not."""

    def __init__(self) -> None:
        super().__init__()
        self.wires = [Wire(0), Wire(1)]
        self.pool = BlockPool(BLOCKS, SIZE)
        self.inbox = Inbox(
            self.wires, self.pool, features, CPU, 0, 1e9, None, lambda level, text: None
        )
        self.items: Dict[int, object] = {}
        self.images: Dict[int, torch.Tensor] = {}
        self.before: Dict[int, Progress] = {}
        self.under_way: List[Tuple[Wire, Header, torch.Tensor]] = []  # header read, payload coming
        self.number = 0

    @rule(size=st.integers(0, BLOCKS * SIZE))
    def request(self, size):
        images = torch.full((1, 3, 1, 1), float(size))
        self.images[self.number] = images
        self.items[self.number] = self.inbox.request(self.number, images)
        self.number += 1

    def messages(self, kind: Kind):
        return [
            (wire, index)
            for wire in self.wires
            for index, (header, _) in enumerate(wire.sent)
            if header.kind == kind
        ]

    @precondition(lambda self: self.messages(Kind.REQUEST))
    @rule(data=st.data(), again=st.booleans(), fails=st.integers(0, 9))
    def answer(self, data, again, fails):
        wire, index = data.draw(st.sampled_from(self.messages(Kind.REQUEST)))
        if not wire.alive:
            return
        header, payload = wire.sent[index]
        if fails == 4:
            self.arrive(
                wire,
                Header(Kind.FAILED, header.item, header.attempt, nbytes=3),
                torch.tensor([65, 66, 67], dtype=torch.uint8),
            )
            return
        self.act(wire, index)
        if again:
            wire.sent.append((header, payload))

    @precondition(lambda self: self.messages(Kind.CREDIT))
    @rule(data=st.data())
    def fill(self, data):
        """Send the next block of a credit, which begins a write."""
        wire, index = data.draw(st.sampled_from(self.messages(Kind.CREDIT)))
        if wire.alive and not any(each is wire for each, _, _ in self.under_way):
            self.act(wire, index)

    def act(self, wire, index):
        """Do what an encoder does with a message."""
        header, payload = wire.sent.pop(index)
        if header.kind == Kind.REQUEST:
            layout, _ = pack_levels(features(*header.layout.unpack(payload, CPU)))
            self.arrive(
                wire,
                Header(Kind.OFFER, header.item, header.attempt, total=layout.nbytes, layout=layout),
            )
        if header.kind == Kind.CREDIT:
            (block, generation), *rest = payload.numpy().view('i8').reshape(-1, 2).tolist()
            nbytes = min(SIZE, header.span)
            if rest:
                left = torch.from_numpy(torch.tensor(rest).numpy().view('u1').reshape(-1))
                wire.sent.insert(
                    index,
                    (
                        replace(header, offset=header.offset + nbytes, span=header.span - nbytes),
                        left,
                    ),
                )
            data = Header(
                Kind.DATA,
                header.item,
                header.attempt,
                header.total,
                header.offset,
                nbytes,
                block=block,
                generation=generation,
            )
            place = self.inbox.place(wire, data)
            self.under_way.append(
                (wire, data, torch.empty(nbytes, dtype=torch.uint8) if place is None else place)
            )

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), damage=st.integers(0, 5))
    def end_write(self, data, damage):
        entry = data.draw(st.sampled_from(self.under_way))
        self.finish(entry, 'damaged' if damage == 5 else None)

    def finish(self, entry, damage):
        self.under_way = [each for each in self.under_way if each is not entry]
        wire, header, place = entry
        value = torch.arange(header.offset, header.offset + header.nbytes).to(torch.uint8) + 3
        place.copy_(value if damage is None else value + 1)
        self.inbox.received(wire, header, place, damage)

    @rule(data=st.data())
    def stale(self, data):
        """A block that nobody is to send now."""
        item = data.draw(st.integers(0, max(0, self.number - 1)))
        wire = data.draw(st.sampled_from(self.wires))
        if any(each is wire for each, _, _ in self.under_way):
            return
        header = Header(
            Kind.DATA,
            item,
            data.draw(st.integers(0, 2)),
            nbytes=SIZE,
            block=data.draw(st.integers(0, BLOCKS - 1)),
            generation=10**6,
        )
        assert self.inbox.place(wire, header) is None
        self.inbox.received(wire, header, torch.full((SIZE,), 200, dtype=torch.uint8), None)

    @precondition(lambda self: any(wire.alive for wire in self.wires))
    @rule(data=st.data(), chance=st.integers(0, 9))
    def lose(self, data, chance):
        if chance != 7:  # seldom: nothing happens any more once both are gone
            return
        wire = data.draw(st.sampled_from([wire for wire in self.wires if wire.alive]))
        wire.alive = False
        for entry in [each for each in self.under_way if each[0] is wire]:
            self.finish(entry, 'it went away')
        self.inbox.lost(wire, 'it went away')

    @precondition(lambda self: not all(wire.alive for wire in self.wires))
    @rule(data=st.data())
    def reopen(self, data):
        wire = data.draw(st.sampled_from([wire for wire in self.wires if not wire.alive]))
        wire.alive, wire.sent = True, []
        self.inbox.opened(wire)

    @rule()
    def go_on(self):
        """Answer, send and receive whatever can be, without a fault."""
        for wire in self.wires:
            while wire.alive and (wire.sent or any(each is wire for each, _, _ in self.under_way)):
                for entry in [each for each in self.under_way if each[0] is wire]:
                    self.finish(entry, None)
                if wire.sent:
                    self.act(wire, 0)

    @precondition(lambda self: self.items)
    @rule()
    def consume(self):
        """Take the first item as the head does, if it is there or nobody else gives it."""
        number = min(self.items)
        arriving = self.items[number]
        if arriving.state == State.NEW and arriving.link is None:
            arriving.wait(0)
        if arriving.state != State.READY:
            return
        assert arriving.arrived == arriving.total
        (got,) = arriving.layout.unpack(arriving.read(0, arriving.total), CPU)
        assert torch.equal(got, features(self.images[number])[0])
        self.inbox.release(arriving)
        assert arriving.state == State.CONSUMED
        del self.items[number]

    def arrive(self, wire, header, payload=NOTHING):
        assert self.inbox.place(wire, header) is None
        self.inbox.received(wire, header, payload, None)

    @invariant()
    def no_block_is_lost_or_shared(self):
        owned = [
            block
            for each in self.items.values()
            for block in [*each._grants, *(block for block, _ in each._pieces)]
        ]
        assert len(set(owned)) == len(owned)
        doomed = [block for block in self.pool._writing if self.pool._owners[block] is None]
        assert self.pool.free + len(owned) + len(doomed) == BLOCKS

    @invariant()
    def progress_goes_one_way(self):
        for number, arriving in self.items.items():
            now, before = arriving.progress, self.before.get(number, Progress())
            assert now.order >= before.order
            assert (
                now.state == before.state
                or now.state in FOLLOWS[before.state]
                or now.attempt > before.attempt
            )
            assert now.state != State.READY or now.arrived == now.total
            self.before[number] = now

    @invariant()
    def blocks_go_in_the_order_of_items(self):
        waits = False
        for arriving in self.items.values():
            if waits:  # it may keep what it had, and is given nothing for itself
                assert arriving.progress.granted <= self.granted.get(
                    (arriving.number, arriving.attempt), 0
                )
            waits |= not arriving.progress.has_all_blocks and arriving.link is not None
        self.granted = {
            (each.number, each.attempt): each.progress.granted for each in self.items.values()
        }

    granted: Dict[Tuple[int, int], int] = {}

    @invariant()
    def the_first_item_can_come(self):
        """Whoever is first and has an offer has a block, or all are being written."""
        for arriving in self.items.values():
            if arriving.link is not None and arriving.progress.wants_blocks:
                assert not self.pool.free
            if not arriving.progress.has_all_blocks and arriving.link is not None:
                return

    def teardown(self):
        for entry in list(self.under_way):
            self.finish(entry, 'it went away')
        self.inbox.close(0)
        assert self.pool.free == self.pool.total


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=60, stateful_step_count=40)
