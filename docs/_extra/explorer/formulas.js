// Logits of positional encodings in closed form, for causal attention of equal contents.
//
// A state names the method and its options (see `DEFAULTS`); `model(state)` gives its logits and
// frequencies. tests/docs/test_explorer.py compares every method and stretch with the library.
"use strict";

globalThis.Formulas = (() => {
  const TURN = 2 * Math.PI;

  // In the order of the menu. `stretches` fit the method; `options` are sliders of its own.
  const METHODS = {
    rope: { label: "RoPE", place: "query_key", stretches: "all", frequencies: true, options: ["base"] },
    p_rope: { label: "p-RoPE", place: "query_key", frequencies: true, options: ["base", "p"] },
    xpos: { label: "xPos", place: "query_key", frequencies: true, options: ["base"] },
    sinusoidal: { label: "Sinusoidal", place: "embedding", stretches: ["interpolate"], frequencies: true, options: ["base"] },
    alibi: { label: "ALiBi", place: "score", stretches: ["interpolate"], options: ["heads", "head"] },
    t5: { label: "T5 (example table)", place: "score", options: ["heads", "head", "size"] },
    kerple: { label: "KERPLE, logarithm", place: "score", options: ["heads", "head", "size", "shape"] },
    kerple_power: { label: "KERPLE, power", place: "score", options: ["heads", "head", "size", "shape"] },
    sandwich: { label: "Sandwich", place: "score", frequencies: true, options: ["heads", "head", "base"] },
    fire: { label: "FIRE (one unit)", place: "score", options: ["heads", "head", "size"] },
    nope: { label: "NoPE", place: "", options: [] },
  };

  // `rotation` ones rotate by other frequencies, the others by another distance.
  const STRETCHES = {
    interpolate: "Interpolation",
    ntk: "NTK-aware",
    ntk_by_parts: "NTK-by-parts",
    yarn: "YaRN",
    llama3: "Llama 3.1",
    dynamic_ntk: "Dynamic NTK",
    longrope: "LongRoPE (default factors)",
    rerope: "ReRoPE",
    leaky_rerope: "Leaky ReRoPE",
    self_extend: "Self-Extend",
    string: "STRING",
    dual_chunk: "Dual chunk",
  };

  const DEFAULTS = {
    method: "rope", stretch: "", factor: 4, logn: false, heads: 8, head: 1, width: 64, base: 10000,
    trained: 512, length: 2048, distance: 128, content: 4, p: 0.75, size: 1, shape: 0.5,
  };

  const stretchesOf = (method) => {
    const fitting = METHODS[method].stretches ?? [];
    return fitting === "all" ? Object.keys(STRETCHES) : fitting;
  };

  const clip = (x, low, high) => Math.min(high, Math.max(low, x));
  const geometric = (count, width, base) =>
    Array.from({ length: count }, (_, t) => base ** ((-2 * t) / width));
  const blended = (kept, factor) => kept.map((share) => 1 / (share + (1 - share) / factor));
  const ramp = (turns, low, high) => turns.map((r) => clip((r - low) / (high - low), 0, 1));

  // What a stretch divides each frequency by, and the factor of rotated features.
  function rescaled(name, state, theta) {
    const { factor: s, trained: L, length: n, width: d, base: b } = state;
    const turns = theta.map((x) => (x * L) / TURN);
    const geometricOf = (x) => theta.map((_, t) => x ** (t / Math.max(1, theta.length - 1)));
    const ones = theta.map(() => 1);
    switch (name) {
      case "interpolate": return [theta.map(() => s), 1];
      case "ntk": return [geometricOf(s), 1];
      case "ntk_by_parts": return [blended(ramp(turns, 1, 32), s), 1];
      case "llama3": return [blended(ramp(turns, 1, 4), s), 1];
      case "dynamic_ntk": return [geometricOf((s * Math.max(n, L)) / L - (s - 1)), 1];
      case "longrope":
        return [n > L ? geometricOf(s) : ones, Math.sqrt(1 + Math.log(s) / Math.log(L))];
      case "yarn": {
        const pair = (r) => (d * Math.log(L / (TURN * r))) / (2 * Math.log(b));
        const low = Math.max(Math.floor(pair(32)), 0);
        let high = Math.min(Math.ceil(pair(1)), d - 1);
        if (low === high) high += 0.001;
        const kept = theta.map((_, t) => 1 - clip((t - low) / (high - low), 0, 1));
        return [blended(kept, s), 0.1 * Math.log(s) + 1];
      }
      default: return [ones, 1];
    }
  }

  // The distance that query i and key j are rotated by.
  function rotatedDistance(name, state) {
    const { factor: s, trained: L } = state;
    switch (name) {
      case "rerope": {
        const w = Math.max(1, Math.floor(L / 2));
        return (i, j) => Math.min(i - j, w);
      }
      case "leaky_rerope": {
        const w = Math.max(1, Math.floor(L / 2));
        const leak = (s * L - w) / (L - w);
        return (i, j) => (i - j < w ? i - j : w + (i - j - w) / leak);
      }
      case "self_extend": {
        const w = Math.max(1, Math.floor(L / 4));
        const group = Math.ceil((s * L - w) / (L - w));
        const gap = w - Math.floor(w / group);
        return (i, j) =>
          i - j < w ? i - j : Math.floor(i / group) - Math.floor(j / group) + gap;
      }
      case "string": {
        const { local, shift } = stringSizes(L, s);
        return (i, j) => (i - j < shift ? i - j : i - j - shift + local);
      }
      case "dual_chunk": {
        const reach = Math.floor(0.75 * L);
        const chunk = reach - Math.max(1, Math.floor(L / 16));
        return (i, j) => {
          const apart = Math.floor(i / chunk) - Math.floor(j / chunk);
          if (apart === 0) return i - j;
          const query = apart === 1 ? (i % chunk) + chunk : 2 * chunk - 1;
          return Math.min(query, reach) - (j % chunk);
        };
      }
      default: return (i, j) => i - j;
    }
  }

  const stringLocal = (L) => Math.max(1, Math.min(128, Math.floor(L / 8)));
  const stringMost = (L) => 2 - stringLocal(L) / L; // STRING's largest factor
  function stringSizes(L, factor) {
    const local = stringLocal(L);
    const needed = Math.ceil(Math.min(factor, stringMost(L)) * L - L) + local;
    return { local, shift: Math.max(Math.floor(L / 3), needed, local + 1) };
  }

  // Slopes in the order of the authors' code.
  function alibiSlopes(heads) {
    const power = 2 ** Math.floor(Math.log2(heads));
    const slopes = Array.from({ length: power }, (_, h) => 2 ** ((-8 * (h + 1)) / power));
    for (let h = 0; h < heads - power; h++) slopes.push(2 ** ((-4 * (2 * h + 1)) / power));
    return slopes;
  }

  // Least distance of each bucket of T5's causal attention but the first, decided in integers.
  function t5Boundaries(buckets = 32, most = 128) {
    const exact = buckets / 2;
    const boundaries = Array.from({ length: exact }, (_, n) => n + 1);
    for (let step = 1, n = exact; step < exact; step++) {
      const least = BigInt(most) ** BigInt(step) * BigInt(exact) ** BigInt(exact - step);
      while (BigInt(n) ** BigInt(exact) < least) n++;
      boundaries.push(n);
    }
    return boundaries;
  }
  const BOUNDARIES = t5Boundaries();
  function t5Bucket(distance) {
    let bucket = 0;
    while (bucket < BOUNDARIES.length && BOUNDARIES[bucket] <= distance) bucket++;
    return bucket;
  }
  // An example of a trained table: it falls with the logarithm of the distance.
  const t5Table = (size, share) =>
    [0, ...BOUNDARIES].map((distance) => -size * share * Math.log1p(distance));

  // FIRE with hidden units [weight, bias, output].
  function fire(units, threshold, scale = 0.1) {
    const log = (x) => Math.log(scale * x + 1);
    return (i, j) => {
      const x = log(i - j) / (log(Math.max(i, threshold)) + 1e-6);
      return units.reduce((sum, [w, b, out]) => sum + out * Math.max(0, w * x + b), 0);
    };
  }

  const cosines = (theta, distance) =>
    theta.reduce((sum, x) => sum + Math.cos(x * distance), 0);

  // A function of a distance that is computed once for each.
  function remembered(compute) {
    const known = new Map();
    return (distance) => {
      let value = known.get(distance);
      if (value === undefined) known.set(distance, (value = compute(distance)));
      return value;
    };
  }

  // The bias that one head adds to the logit of query i and key j.
  function bias(state, head) {
    const { method, heads, base, factor, size, shape, trained } = state;
    const share = head / heads;
    switch (method) {
      case "alibi": {
        const slope = alibiSlopes(heads)[head - 1] / (state.stretch === "interpolate" ? factor : 1);
        return (i, j) => -slope * (i - j);
      }
      case "t5": {
        const table = t5Table(size, share);
        const of = remembered((distance) => table[t5Bucket(distance)]);
        return (i, j) => of(i - j);
      }
      case "kerple": return (i, j) => -size * share * Math.log1p(shape * (i - j));
      case "kerple_power": return (i, j) => -size * share * (i - j) ** shape;
      case "sandwich": {
        const theta = geometric(64, 128, base);
        const of = remembered((distance) => cosines(theta, distance) / (8 * share));
        return (i, j) => of(i - j);
      }
      case "fire": return fire([[1, 0, -size * share]], trained);
      default: return () => 0;
    }
  }

  // Frequencies as trained, with those that the method does not rotate by at 0.
  function trainedFrequencies(state) {
    const { method, width, base, p } = state;
    if (method === "sandwich") return geometric(64, 128, base);
    if (!METHODS[method].frequencies) return [];
    const theta = geometric(width / 2, width, base);
    return method === "p_rope" ? theta.map((x, t) => (t < Math.floor((p * width) / 2) ? x : 0)) : theta;
  }

  // Logits and frequencies of a state: `logit(i, j)` for keys j up to i.
  function model(given) {
    const state = { ...DEFAULTS, ...given };
    if (!stretchesOf(state.method).includes(state.stretch)) state.stretch = "";
    const { method, stretch, content, trained, width } = state;
    const before = trainedFrequencies(state);
    const rotates = METHODS[method].frequencies && method !== "sandwich";
    const [divisors, gain] = rotates ? rescaled(stretch, state, before) : [before.map(() => 1), 1];
    const theta = before.map((x, t) => x / divisors[t]);
    let raw;
    if (rotates) {
      const decays = theta.map((_, t) =>
        method === "xpos" ? Math.log(((2 * t) / width + 0.4) / 1.4) / 512 : 0);
      const factor = (content * gain * gain) / theta.length;
      const of = remembered((distance) => {
        let sum = 0;
        for (let t = 0; t < theta.length; t++)
          sum += Math.exp(decays[t] * distance) * Math.cos(theta[t] * distance);
        return factor * sum;
      });
      const distance = rotatedDistance(stretch, state);
      raw = (i, j) => of(distance(i, j));
    } else {
      const added = bias(state, state.head);
      raw = (i, j) => content + added(i, j);
    }
    const kappa = (i) => (state.logn ? Math.max(1, Math.log(i + 1) / Math.log(trained)) : 1);
    return {
      state, gain, before, theta,
      logit: (i, j) => kappa(i) * raw(i, j),
      biasOf: (head, i, j) => kappa(i) * bias(state, head)(i, j),
      distance: rotates ? rotatedDistance(stretch, state) : (i, j) => i - j,
    };
  }

  return {
    METHODS, STRETCHES, DEFAULTS, TURN, stretchesOf, stringMost, alibiSlopes, t5Bucket, t5Table,
    fire, model,
  };
})();
