"""The scenarios of the fault table in docs/how-to/clusters.md."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Sequence

from faults import Outcome, Struck, scenario
from machines import Machine
from step_log import STARTING

# --- processes that are killed


@scenario('`kill -9` of a rank')
def rank_killed(job: Struck) -> Outcome:
    job.train()
    job.strike(lambda: job.kill(job.node_of_rank(1)))
    outcome = job.recovered('all three restart from the checkpoint', world=3)
    job.finish()
    return outcome


@scenario('`kill -9` of rank 0')
def rank_0_killed(job: Struck) -> Outcome:
    job.train()
    job.strike(lambda: job.kill(job.node_of_rank(0)))
    outcome = job.recovered('all three restart from the checkpoint', world=3)
    job.finish()
    return outcome


def lose_launcher(job: Struck, rank: int) -> Outcome:
    job.train()
    node = job.node_of_rank(rank)
    job.strike(lambda: os.kill(node.launcher(), signal.SIGKILL))
    outcome = job.recovered('its rank ends with it; the other two continue', 2, [node])
    job.finish([node])
    return outcome


@scenario('`kill -9` of a launcher')
def launcher_killed(job: Struck) -> Outcome:
    return lose_launcher(job, 1)


@scenario('`kill -9` of the launcher of rank 0')
def launcher_0_killed(job: Struck) -> Outcome:
    return lose_launcher(job, 0)


@scenario('a machine without power: nothing of it ends a connection')
def power_lost(job: Struck) -> Outcome:
    job.train()
    node = job.node_of_rank(1)
    job.strike(node.power_off)
    outcome = job.recovered('the other two continue', 2, [node])
    job.finish([node])
    return outcome


@scenario('SIGTERM to a launcher')
def launcher_ended(job: Struck) -> Outcome:
    job.train()
    node = job.node_of_rank(1)
    job.strike(lambda: os.kill(node.launcher(), signal.SIGTERM))
    outcome = job.recovered('the other two continue', 2, [node])
    job.finish([node])
    return outcome


@scenario('SIGUSR1 to a launcher, and all started again', steps=60)
def asked_to_stop(job: Struck) -> Outcome:
    job.train()
    stopped = job.node_of_rank(1)
    first = [processes[0] for processes in job.launchers.values()]
    job.strike(lambda: os.kill(stopped.launcher(), signal.SIGUSR1))
    assert [each.wait(60) for each in first] == [85] * 3, job.outputs()
    done = job.events()[-1].step
    assert (job.work / 'stopped.pth').exists()
    for node in job.machines.nodes:
        job.launch(node, nodes=job.nodes)
    outcome = job.recovered(
        'all save and leave with status 85; the same store serves them again', 3
    )
    assert (
        outcome.lost == 0
        and min(
            each.step
            for each in job.events('step', job.hit)
            if each.pid not in {old.pid for old in job.before}
        )
        == done + 1
    )
    job.finish()
    return outcome


@scenario('`kill -9` of the store', steps=100)
def store_killed(job: Struck) -> Outcome:
    job.train()
    job.strike(lambda: job.machines.store.signal(signal.SIGKILL))
    outcome = job.untouched('the training continues without it', 6)
    job.finish()
    return outcome


@scenario('the same, a launcher 3 s later, and the store again 5 s later', steps=100)
def store_and_launcher_killed(job: Struck) -> Outcome:
    job.train()
    node = job.node_of_rank(1)
    job.machines.store.signal(signal.SIGKILL)
    time.sleep(3)
    job.strike(lambda: os.kill(node.launcher(), signal.SIGKILL))
    time.sleep(5)
    job.start_store()
    outcome = job.recovered('the other two wait for the store, then continue', 2, [node])
    job.finish([node])
    return outcome


@scenario('the store again while the training continues, then a machine joins', steps=250)
def store_again(job: Struck) -> Outcome:
    job.train(2)
    job.machines.store.signal(signal.SIGKILL)
    two = [job.launchers[node.name][-1] for node in job.machines.nodes[:2]]
    job.until(lambda: all('store has ended' in each.output for each in two), 60, 'word of the end')
    job.start_store()
    job.until(lambda: all('store answers again' in each.output for each in two), 60, 'new store')
    worlds = {each.world for each in job.events('start')}
    assert worlds == {2} and len(job.events('start')) == 2, job.outputs()  # untouched until now
    job.strike(lambda: job.launch(job.machines.nodes[2], nodes=job.nodes))
    outcome = job.recovered('all three restart, when it joins', 3)
    job.finish()
    return outcome


# --- machines without a shared disk


def lose_writer(job: Struck, world: int, lost: Sequence[Machine]) -> Outcome:
    """Take the machine away that writes the checkpoints, with its disk and its memory."""
    node = job.node_of_rank(0)
    saved = job.wait_for('save', after=time.time(), world=world + 1)
    job.until(
        lambda: [
            path
            for machine in job.machines.nodes
            if machine not in (node, *lost)
            for path in machine.memory()
            if path.endswith(f'-iter_{saved.step}.pth')
        ],
        60,
        f'copy of step {saved.step}',
    )
    job.strike(lambda: node.signal(signal.SIGKILL, node.pids()))
    shutil.rmtree(job.work_of(node))
    outcome = job.recovered('the others continue from the copy', world, [node, *lost])
    begun = job.wait_for('start', after=job.hit)
    assert begun.step >= saved.step, (begun, saved, job.outputs())
    return outcome


@scenario(
    '`neighbor_copy`: the machine that writes is lost, and its disk', core=True, own_disks=True
)
def writer_lost(job: Struck) -> Outcome:
    job.train()
    node = job.node_of_rank(0)
    outcome = lose_writer(job, 2, [])
    job.finish([node])
    return outcome


@scenario(
    '`neighbor_copy`: the machine that writes is lost, and then the next one',
    nodes=4,
    own_disks=True,
    steps=150,
)
def two_writers_lost(job: Struck) -> Outcome:
    job.train(4, 2, 4)
    first = job.node_of_rank(0)
    lose_writer(job, 3, [])
    second = job.node_of_rank(0)
    outcome = lose_writer(job, 2, [first])
    job.finish([first, second])
    return outcome


@scenario('`neighbor_copy`: the machine with the copy is lost', own_disks=True)
def keeper_lost(job: Struck) -> Outcome:
    job.train()
    node = job.until(
        lambda: [
            machine
            for machine in job.machines.nodes
            if any(name.endswith('.pth') for name in machine.memory())
        ],
        60,
        'copy',
    )[0]
    job.strike(node.power_off)
    outcome = job.recovered('the other two continue; the third receives the checkpoint', 2, [node])
    job.finish([node])
    return outcome


# --- processes that are frozen


@scenario('SIGSTOP of a rank', core=True)
def rank_stopped(job: Struck) -> Outcome:
    job.train()
    node = job.node_of_rank(1)
    job.strike(lambda: job.kill(node, signal.SIGSTOP))
    outcome = job.recovered('named and killed; all three restart', 3)
    told = job.launchers[job.node_of_rank(0).name][-1].output
    assert f'on host {node.name}' in told and 'SIGSTOP' in told, job.outputs()
    job.finish()
    return outcome


@scenario('SIGSTOP of rank 0')
def rank_0_stopped(job: Struck) -> Outcome:
    job.train()
    node = job.node_of_rank(0)
    job.strike(lambda: job.kill(node, signal.SIGSTOP))
    outcome = job.recovered('named and killed; all three restart', 3)
    job.finish()
    return outcome


@scenario('SIGSTOP of a launcher', steps=150)
def launcher_stopped(job: Struck) -> Outcome:
    return stop_launcher(job, 1)


@scenario('SIGSTOP of the launcher of rank 0', steps=150)
def launcher_0_stopped(job: Struck) -> Outcome:
    return stop_launcher(job, 0)


def stop_launcher(job: Struck, rank: int) -> Outcome:
    job.train()
    node = job.node_of_rank(rank)
    launcher = node.launcher()
    job.strike(lambda: os.kill(launcher, signal.SIGSTOP))
    outcome = job.untouched('the training continues', 11)
    os.kill(launcher, signal.SIGCONT)
    job.finish()
    return outcome


@scenario('`kill -9` of the watch of a node, which beats for it', steps=300)
def watch_killed(job: Struck) -> Outcome:
    job.train()
    node = job.node_of_rank(1)
    job.strike(lambda: node.signal(signal.SIGKILL, node.pids('node_watch')))
    outcome = job.recovered('as a lost node; all three restart', 3)
    job.finish()
    return outcome


@scenario('SIGSTOP of the watch of a node', steps=300)
def watch_stopped(job: Struck) -> Outcome:
    job.train()
    node = job.node_of_rank(1)
    job.strike(lambda: node.signal(signal.SIGSTOP, node.pids('node_watch')))
    outcome = job.recovered('as a lost node; all three restart', 0)
    job.finish()
    return outcome


@scenario('SIGSTOP of the store for 10 s', steps=180)
def store_stopped(job: Struck) -> Outcome:
    job.train()
    job.strike(lambda: job.machines.store.signal(signal.SIGSTOP))
    outcome = job.untouched('the training continues', 10)
    job.machines.store.signal(signal.SIGCONT)
    job.finish()
    return outcome


# --- networks


@scenario('link of a machine down, and up again', core=True, steps=150)
def link_down(job: Struck) -> Outcome:
    job.train()
    node = job.node_of_rank(1)
    job.strike(node.cut)
    outcome = job.recovered('the other two continue; the third comes back when it can', 2, [node])
    node.heal()
    job.wait_for('step', world=3, after=time.time())
    job.finish()
    return outcome


@scenario('link of rank 0 down, and up again', steps=150)
def link_of_0_down(job: Struck) -> Outcome:
    job.train()
    node = job.node_of_rank(0)
    job.strike(node.cut)
    outcome = job.recovered('the other two continue; the third comes back when it can', 2, [node])
    node.heal()
    job.wait_for('step', world=3, after=time.time())
    job.finish()
    return outcome


@scenario('link of a machine down for 3 s', steps=100)
def link_blinks(job: Struck) -> Outcome:
    job.train()
    node = job.node_of_rank(1)
    job.strike(node.cut)
    time.sleep(3)
    node.heal()
    outcome = job.untouched('the step takes longer', 8)
    job.finish()
    return outcome


def one_way(job: Struck, direction: str) -> Outcome:
    job.train()
    node = job.node_of_rank(1)
    job.strike(lambda: node.drop(direction))
    outcome = job.recovered('the other two continue', 2, [node])
    node.heal()
    job.wait_for('step', world=3, after=time.time())
    job.finish()
    return outcome


@scenario('a machine hears nothing, and is heard (nftables)', steps=150)
def nothing_comes_in(job: Struck) -> Outcome:
    return one_way(job, 'in')


@scenario('a machine is not heard, and hears (nftables)', steps=150)
def nothing_goes_out(job: Struck) -> Outcome:
    return one_way(job, 'out')


@scenario('two machines do not hear each other, both hear rank 0; `timeout=20`', timeout=20)
def two_apart(job: Struck) -> Outcome:
    job.train()
    one, two = job.node_of_rank(1), job.node_of_rank(2)
    job.strike(lambda: one.drop('in', [two]), lambda: one.drop('out', [two]))
    job.until(job.noticed, 90, 'word of the lost connection')
    one.heal()
    outcome = job.recovered(
        'noticed by the timeout of the collective alone; healed then, all three restart', 3
    )
    job.finish()
    return outcome


@scenario('four machines divided in two halves, 2:4, the store on one side', nodes=4, steps=150)
def halves(job: Struck) -> Outcome:
    job.train(4, 2, 4)
    far = job.machines.nodes[2:]
    near = job.machines.nodes[:2]
    job.strike(
        *(
            lambda node=node: (
                node.drop('in', [*near, job.machines.store]),
                node.drop('out', [*near, job.machines.store]),
            )
            for node in far
        )
    )
    outcome = job.recovered('the half with the store continues, the other waits', 2, far)
    for node in far:
        node.heal()
    job.wait_for('step', world=4, after=time.time())
    job.finish()
    return outcome


@scenario('small packets pass to and from a machine, large ones are lost (nftables)', steps=200)
def large_packets_lost(job: Struck) -> Outcome:
    job.train()
    node = job.node_of_rank(1)
    job.strike(node.drop_large)
    job.until(lambda: job.noticed(r'rank\(s\) \[[01]\] on host .*MTU'), 60, 'word of the MTU')
    outcome = job.recovered(
        'named, with the MTU as a possible cause; the other two continue', 2, [node]
    )
    node.heal()
    job.wait_for('step', world=3, after=time.time())
    job.finish()
    return outcome


@scenario('link of a machine at 200 kbit/s', steps=60)
def link_throttled(job: Struck) -> Outcome:
    job.train()
    job.strike(lambda: job.node_of_rank(1).throttle('200kbit'))
    outcome = job.untouched('slower, no restart', 6)
    job.finish()
    return outcome


# --- machines that join


def join(job: Struck, kind: str, happened: str) -> Outcome:
    job.train(2)
    if kind != 'step':
        job.wait_for(kind, after=time.time())
    job.strike(lambda: job.launch(job.machines.nodes[2], nodes=job.nodes))
    outcome = job.recovered(happened, 3)
    job.finish()
    return outcome


@scenario('a machine joins', steps=120)
def joins(job: Struck) -> Outcome:
    return join(job, 'step', 'all three restart')


@scenario('a machine joins during a save', steps=60, slow=dict(save=1.5))
def joins_in_save(job: Struck) -> Outcome:
    return join(job, 'save', 'all three restart')


@scenario('a machine joins during a validation', steps=60, validate=10, slow=dict(validation=4))
def joins_in_validation(job: Struck) -> Outcome:
    return join(job, 'validation', 'all three restart')


@scenario('two machines join at once', nodes=4, steps=120)
def two_join(job: Struck) -> Outcome:
    job.train(2, 2, 4)
    job.strike(
        *(lambda node=node: job.launch(node, nodes=job.nodes) for node in job.machines.nodes[2:])
    )
    outcome = job.recovered('all four restart, once', 4)
    job.finish()
    return outcome


def join_in_vain(job: Struck, happened: str, words: str, *options: str, **environ: str) -> Outcome:
    job.train(2)
    node = job.machines.nodes[2]
    job.strike(lambda: job.launch(node, *options, nodes=job.nodes, **environ))
    process = job.launchers[node.name][-1]
    job.until(lambda: process.status is not None, 90, 'end of the machine that joins')
    assert process.status == 1 and words in process.output, process.output
    outcome = job.recovered(happened, 2)
    job.finish([node])
    return outcome


@scenario('a machine joins with another config', steps=300, core=True)
def other_config_joins(job: Struck) -> Outcome:
    return join_in_vain(
        job,
        'it is refused; the other two restart',
        'NodesDifferError',
        '--cfg-options',
        'optim_wrapper.optimizer.lr=0.06',
    )


@scenario('a machine without its card joins', steps=300)
def broken_card_joins(job: Struck) -> Outcome:
    return join_in_vain(
        job, 'it leaves; the other two restart', 'AcceleratorError', ACCELERATOR='cuda'
    )


@scenario('link of a machine down while its ranks start')
def link_down_at_start(job: Struck) -> Outcome:
    job.start_store()
    one, two, node = job.machines.nodes
    for each in (one, two):
        job.launch(each, nodes='2:3')
    starting = job.machines.folder / 'starting'
    job.launch(node, nodes='2:3', **{STARTING: str(starting)})
    job.until(starting.exists, 90, 'start of a rank')
    job.strike(node.cut)
    first = job.wait_for('step', after=job.hit, world=2)
    job.finish([node])
    return Outcome(
        'the other two continue without it', job.noticed(but=[node]), first.time - job.hit
    )


@scenario('a fourth and a fifth machine of 2:3, and a launcher killed', nodes=5, steps=300)
def spares(job: Struck) -> Outcome:
    job.train()
    spares = job.machines.nodes[3:]
    for node in spares:
        job.launch(node, nodes=job.nodes)
    job.until(
        lambda: all('places are taken' in job.launchers[node.name][-1].output for node in spares),
        60,
        'word of the machines that wait',
    )
    job.wait_for('step', after=time.time() + 5)
    assert not [each for each in job.events('start') if each.host in ('node3', 'node4')]
    node = job.node_of_rank(1)
    job.strike(lambda: os.kill(node.launcher(), signal.SIGKILL))
    outcome = job.recovered('one of the two that waited takes its place', 3, [node])
    job.wait_for('step', after=time.time() + 10)
    assert len({each.pid for each in job.events('start', job.hit)}) <= 6, job.outputs()
    job.finish([node])
    told = [job.launchers[each.name][-1].output for each in job.machines.nodes if each is not node]
    assert sum('waited for one of its 3 places' in each for each in told) == 1, job.outputs()
    return outcome


# --- more than one fault


@scenario('two launchers of four killed, 5 s apart', nodes=4, core=True)
def two_faults(job: Struck) -> Outcome:
    job.train(4, 2, 4)
    first, second = job.node_of_rank(1), job.node_of_rank(2)
    launchers = first.launcher(), second.launcher()
    job.strike(lambda: os.kill(launchers[0], signal.SIGKILL))
    time.sleep(5)
    os.kill(launchers[1], signal.SIGKILL)
    outcome = job.recovered('the other two continue', 2, [first, second])
    job.finish([first, second])
    return outcome


@scenario('a launcher killed, and another while the ranks resume', nodes=4)
def fault_in_resume(job: Struck) -> Outcome:
    job.train(4, 2, 4)
    first, second = job.node_of_rank(1), job.node_of_rank(2)
    launchers = first.launcher(), second.launcher()
    job.strike(lambda: os.kill(launchers[0], signal.SIGKILL))
    job.wait_for('start', after=job.hit)
    os.kill(launchers[1], signal.SIGKILL)
    outcome = job.recovered('the other two continue', 2, [first, second])
    job.finish([first, second])
    return outcome


@scenario('a rank that is killed at each start, `MAX_RESTARTS=2`')
def too_many_faults(job: Struck) -> Outcome:
    job.train(MAX_RESTARTS='2')
    node = job.node_of_rank(1)
    job.strike(lambda: job.kill(node))
    process, killed = job.launchers[node.name][-1], {job.rank_of(node)}
    while process.status is None:
        starts = [
            each
            for each in job.events('start', job.hit)
            if each.host == node.name and each.pid not in killed
        ]
        for each in starts:
            killed.add(each.pid)
            job.kill(node)
        assert time.time() < job.hit + 90, job.outputs()
        time.sleep(0.05)
    assert len(killed) == 3, (killed, job.outputs())
    for each in job.launchers.values():
        assert each[-1].wait(60) != 0, job.outputs()
    return Outcome('all end with an error that names the rank', job.noticed())


@scenario('fewer machines than the smallest number, `JOIN_TIMEOUT=5`', nodes=1)
def too_few(job: Struck) -> Outcome:
    job.start_store()
    job.strike(lambda: job.launch(job.machines.nodes[0], nodes='2:3', JOIN_TIMEOUT='5'))
    process = job.launchers['node0'][0]
    assert process.wait(60) != 0
    assert 'needs 2 machines' in process.output, process.output
    return Outcome('an error that names those that came', job.noticed())


# --- disks, clocks, slowness


@scenario('disk full at a save, and room again', disks=dict(work='1m'), steps=60)
def disk_full(job: Struck) -> Outcome:
    disk = job.machines.disks['work']
    job.work = disk / 'work'
    job.train()
    other = disk / 'other'
    # Room for lines of the log, and for no checkpoint.
    job.strike(
        lambda: os.system(f'dd if=/dev/zero of={other} bs=1k 2>/dev/null; truncate -s -8k {other}')
    )
    launcher = job.launchers[job.node_of_rank(0).name][-1]
    job.until(lambda: 'since the disk is full: it needs' in launcher.output, 60, 'word of the disk')
    other.unlink()
    outcome = job.recovered(
        'an error with the sizes; the ranks restart from the checkpoint '
        'before, `MAX_RESTARTS` times while there is no room',
        0,
    )
    job.finish()
    return outcome


@scenario('clock of a machine 20 s ahead (libfaketime)')
def clock_ahead(job: Struck) -> Outcome:
    job.start_store()
    library = next(Path('/usr/lib').glob('*/faketime/libfaketime.so.1'))
    job.strike(
        lambda: job.launch(
            job.machines.nodes[0], nodes='2:3', cold=True, LD_PRELOAD=str(library), FAKETIME='+20s'
        )
    )
    process = job.launchers['node0'][0]
    assert process.wait(90) != 0
    assert 'clock' in process.output, process.output
    return Outcome('refused at the start, with the seconds', job.noticed())


@scenario('a rank that takes 3 s longer for each step', steps=16, slow=dict(node1=3))
def rank_slow(job: Struck) -> Outcome:
    job.train()
    job.strike()
    outcome = job.untouched('no restart', 20)
    job.finish()
    return outcome


@scenario('a validation of 30 s', steps=15, validate=10, slow=dict(validation=30))
def validation_slow(job: Struck) -> Outcome:
    job.train()
    job.wait_for('validation')
    job.strike()
    outcome = job.untouched('no restart', 29)
    job.finish()
    return outcome
