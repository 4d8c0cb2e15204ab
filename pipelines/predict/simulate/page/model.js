"use strict";
// The batching simulator in ticks, as pipelines/simulator has it in Python: same steps, same order, same numbers.

const NOOP = 0, CONTEXT = 1, GEN = 2, EOS = 3;

/**
 * Run the engine until the step boundary at or after `until`, or until all is done.
 *
 * Each step: every slot advances by one token or piece of its prompt, what is finished leaves, what has arrived queues,
 * free slots are filled, and the clock moves on by max(prefill ticks together, ticks of a decode step, 1).
 *
 * @param engine {policy, slots, prefill, decode, chunks, max_num_tokens}; max_num_tokens null is no limit
 * @param load [{arrival, isl, osl}], in the order they arrive
 * @param until ticks
 * @returns {{requests, iterations, tokens, end}} times in ticks, null for what had not happened; `refused` of an
 *   iteration is what kept the first request of the queue from a slot, "" if nobody waited
 */
function simulate(engine, load, until) {
  const requests = load.map(({arrival, isl, osl}, index) =>
    ({index, arrival, isl, osl, left: isl, piece: 0, produced: 0, admitted: null, first: null, end: null}));
  const slots = Array(engine.slots).fill(null), iterations = [], queue = [];
  let now = 0, next = 0, unfinished = requests.length, tokens = 0;
  while (now < until) {
    const came = advance(slots, now);
    unfinished -= came.finished;
    tokens += came.tokens;
    if (!unfinished) break;
    while (next < requests.length && requests[next].arrival <= now) queue.push(requests[next++]);
    const decoding = slots.filter(each => each && !each.left).length;
    const {share, refused} = schedule(engine, slots, queue, decoding, now);
    const ticks = Math.max(engine.prefill * share, decoding ? engine.decode : 0, 1);
    const owners = slots.map(each => each && each.index);
    iterations.push({start: now, ticks, tokens, queue: queue.length, refused, owners, cells: slots.map(cell)});
    now += ticks;
  }
  return {requests, iterations, tokens, end: now};
}

/** Every slot did its part of the iteration that ends now; returns how many tokens came and how many requests ended. */
function advance(slots, now) {
  let tokens = 0, finished = 0;
  slots.forEach((request, slot) => {
    if (!request) return;
    if (request.left && (request.left -= request.piece)) return;
    request.produced++;
    tokens++;
    if (request.first === null) request.first = now;
    if (request.produced === request.osl) {
      request.end = now;
      slots[slot] = null;
      finished++;
    }
  });
  return {tokens, finished};
}

/**
 * Choose the prompts of this iteration: those in slots already, then the queue, first come, first served.
 *
 * @returns {{share, refused}} the sum of their shares of a whole prompt, and why the first of the queue got no slot
 */
function schedule(engine, slots, queue, decoding, now) {
  const chunked = engine.policy === "inflight_chunked";
  let room = (engine.max_num_tokens ?? Infinity) - decoding, share = 0, prompts = 0;
  const take = request => {
    const whole = Math.ceil(request.isl / engine.chunks);
    request.piece = Math.min(request.left, whole, chunked ? Math.max(room, 0) : Infinity);
    room -= request.piece;
    share += request.piece / request.isl;
    prompts += request.piece > 0;
  };
  const inOrder = slots.filter(each => each && each.left).sort((one, other) => one.index - other.index);
  inOrder.forEach(take);
  if (engine.policy === "static" && slots.some(Boolean)) return {share, refused: queue.length ? "batch" : ""};
  const refusal = head => {
    if (!slots.includes(null)) return "slots";
    if (engine.policy === "one_prefill" && prompts) return "one_prefill";
    const alone = !slots.some(Boolean);
    return (chunked ? room <= 0 : !alone && Math.ceil(head.isl / engine.chunks) > room) ? "max_num_tokens" : "";
  };
  let refused = "";
  while (queue.length && !(refused = refusal(queue[0]))) {
    const head = queue.shift();
    slots[slots.indexOf(null)] = head;
    head.admitted = now;
    take(head);
  }
  return {share, refused};
}

/** What a slot does in an iteration. */
function cell(request) {
  if (!request) return NOOP;
  if (request.left) return CONTEXT;
  return request.produced + 1 === request.osl ? EOS : GEN;
}

/** The counters at a time: what had happened by then. Means are null when there is nothing to take them of. */
function counters(run, now = run.end) {
  const seen = run.requests.filter(each => each.first !== null && each.first <= now);
  const done = seen.filter(each => each.end !== null && each.end <= now);
  const long = done.filter(each => each.osl > 1);
  let busy = 0, tokens = 0, queue = 0, refused = "";
  for (const step of run.iterations) {
    if (step.start > now) break;
    busy += Math.min(step.ticks, now - step.start) * step.cells.filter(each => each !== NOOP).length;
    ({queue, tokens, refused} = step);
  }
  if (now >= run.end) tokens = run.tokens;
  const begin = run.requests.length ? run.requests[0].arrival : 0;
  const per = value => now > begin ? 1000 * value / (now - begin) : 0;
  const slots = run.iterations.length ? run.iterations[0].cells.length : 1;
  return {
    now, done: done.length, queue, refused,
    ttft: mean(seen.map(each => each.first - each.arrival)),
    e2e: mean(done.map(each => each.end - each.arrival)),
    itl: mean(long.map(each => (each.end - each.first) / (each.osl - 1))),
    requests_per_1k: per(done.length), tokens_per_1k: per(tokens),
    slot_use: now > 0 ? 100 * busy / (slots * now) : 0,
  };
}

function mean(values) {
  return values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null;
}
