"""The sum of a quota in Redis: one script that takes one router's ask and gives its answer. Sent by the quota keeper.

A hash for each quota: `b:<number>` is what was used in one bucket of time, `r:<share>` one router's share: the sequence
of its last ask, what it had used ever by then, what it holds, when that ends (Unix ms), and what of it was counted as
used at an end. Time is Redis's own. The key ends by itself when nobody asks any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from naru_router.core.tenancy.quota import BUCKET_S, SHARE_TTL_S, WINDOW_S, Answer, Ask

# Bucket numbers above that of now come from a clock that was set back since: they count as used now.
EXCHANGE = """
redis.replicate_commands()
local key, me, level = KEYS[1], 'r:' .. ARGV[1], ARGV[2] == '1'
local sequence, used, told = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local held, want, need, limit = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local window, bucket, ttl = tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local current, oldest = math.floor(now / bucket), math.floor((now - window) / bucket)
local kind = redis.call('TYPE', key).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', key) end

local function text(number) return string.format('%.0f', number) end

local buckets, total, others, fresh = {}, 0, 0, 0
local seen, charged, last = told, 0, 0
local data = redis.call('HGETALL', key)
for i = 1, #data, 2 do
  local field, value = data[i], data[i + 1]
  local index, amount = string.match(field, '^b:(%d+)$'), string.match(value, '^%d+$')
  local a, b, c, d, e = string.match(value, '^(%d+) (%d+) (%d+) (%d+) (%d+)$')
  if index and amount then
    index, amount = tonumber(index), tonumber(amount)
    if index < oldest or index > current or level then
      redis.call('HDEL', key, field)
      if index > current and not level then fresh = fresh + amount end
    else
      buckets[#buckets + 1] = {index, amount}
      total = total + amount
    end
  elseif a and string.sub(field, 1, 2) == 'r:' then
    local holds, ends, counted = tonumber(c), math.min(tonumber(d), now + ttl), tonumber(e)
    if ends <= now then
      if not level then fresh, counted = fresh + holds, counted + holds end
      holds = 0
    end
    if field == me then
      last, seen, charged = tonumber(a), tonumber(b), counted
    elseif ends + window + ttl <= now then
      redis.call('HDEL', key, field)
    elseif ends <= now and tonumber(c) > 0 then
      redis.call('HSET', key, field, a .. ' ' .. b .. ' 0 ' .. text(ends) .. ' ' .. text(counted))
    end
    if field ~= me then others = others + holds end
  else
    redis.call('HDEL', key, field)
  end
end

local is_late = sequence <= last
if not is_late then
  local more = math.max(0, used - seen)
  local covered = math.min(more, charged)
  fresh, charged = fresh + more - covered, charged - covered
end
if fresh > 0 then
  total = total + fresh
  redis.call('HINCRBY', key, 'b:' .. text(current), text(fresh))
  buckets[#buckets + 1] = {current, fresh}
end
local free = limit - total - others
local gets = math.max(0, math.min(held + want, free))
if is_late then
  gets = -1
else
  redis.call('HSET', key, me,
    text(sequence) .. ' ' .. text(used) .. ' ' .. text(gets) .. ' ' .. text(now + ttl) .. ' ' .. text(charged))
end
redis.call('PEXPIRE', key, text(2 * window + 4 * ttl))

table.sort(buckets, function(x, y) return x[1] < y[1] end)
local left, retry, reset = free - math.max(0, gets), 0, 0
local at = 1
while left < need and at <= #buckets do
  left = left + buckets[at][2]
  retry = (buckets[at][1] + 1) * bucket + window - now
  at = at + 1
end
if left < need then retry = math.max(retry, ttl) end
if #buckets > 0 then reset = (buckets[#buckets][1] + 1) * bucket + window - now end
return {gets, total, others, retry, reset}
"""


def arguments(share_id: str, is_level: bool, limit: int, ask: Ask) -> list[str | int]:
    """What the script takes beside the key."""
    return [
        share_id,
        "1" if is_level else "0",
        ask.sequence,
        ask.used_total,
        ask.told_total,
        ask.held,
        ask.want,
        ask.need,
        limit,
        0 if is_level else round(WINDOW_S * 1000),
        round(BUCKET_S * 1000),
        round(SHARE_TTL_S * 1000),
    ]


def read_answer(reply: object) -> Answer | None:
    """The script's reply; None: the ask came late, a newer one has been answered."""
    if not isinstance(reply, Sequence) or len(reply) != 5:
        raise ValueError(f"the script gave {str(reply)[:80]!r}")
    held, used, others, retry_ms, reset_ms = (int(number) for number in reply)
    return None if held < 0 else Answer(held, used, others, max(0, retry_ms) / 1000, max(0, reset_ms) / 1000)
