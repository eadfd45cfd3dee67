#include "messages.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace cuda_double {
namespace {

class Message {
 public:
  explicit Message(Operation* operation)
      : operation_(*operation),
        is_send_(operation->kind == Operation::Kind::kSend),
        channel_(is_send_ ? channel(operation->comm->rank, operation->peer)
                          : channel(operation->peer, operation->comm->rank)) {}

  bool is_done() const { return is_done_; }
  bool is_too_long() const { return is_too_long_; }
  std::pair<bool, int> direction() const { return {is_send_, operation_.peer}; }

  // Moves as many pieces as the channel allows; returns whether there was any.
  bool advance() {
    bool has_moved = false;
    while (!is_done_ && !is_too_long_ && is_send_ != static_cast<bool>(channel_.is_full)) {
      const size_t piece = std::min(kPiece, operation_.bytes() - done_bytes_);
      is_send_ ? send(piece) : receive(piece);
      has_moved = true;
      is_done_ = done_bytes_ >= operation_.bytes();
    }
    return has_moved;
  }

 private:
  Channel& channel(int from, int to) const {
    return operation_.comm->memory.channel(from, to);
  }

  void send(size_t piece) {
    memcpy(channel_.data, operation_.source_at(done_bytes_), piece);
    channel_.bytes = static_cast<uint32_t>(piece);
    channel_.is_full = 1;
    done_bytes_ += piece;
  }

  void receive(size_t room) {
    is_too_long_ = channel_.bytes > room;
    if (is_too_long_) return;
    memcpy(operation_.target_at(done_bytes_), channel_.data, channel_.bytes);
    done_bytes_ += channel_.bytes;
    channel_.is_full = 0;
  }

  const Operation& operation_;
  const bool is_send_;
  Channel& channel_;
  size_t done_bytes_ = 0;
  bool is_done_ = false, is_too_long_ = false;
};

}  // namespace

bool exchange_messages(std::vector<Operation*>& operations) {
  auto* comm = operations.front()->comm;
  std::vector<Message> messages(operations.begin(), operations.end());
  for (;;) {
    const uint32_t changes = comm->state().channel_changes;
    bool has_moved = false, are_done = true;
    std::set<std::pair<bool, int>> busy_directions;
    for (auto& message : messages) {
      if (message.is_done()) continue;
      if (!busy_directions.insert(message.direction()).second) {
        are_done = false;
        continue;
      }
      has_moved |= message.advance();
      if (message.is_too_long()) return false;
      are_done &= message.is_done();
      if (message.is_done()) busy_directions.erase(message.direction());
    }
    if (has_moved) {
      ++comm->state().channel_changes;
      wake_all(comm->state().channel_changes);
    }
    if (are_done) return true;
    if (has_moved) continue;
    if (comm->is_aborted) return false;
    sleep_while(comm->state().channel_changes, changes);
  }
}

}  // namespace cuda_double
