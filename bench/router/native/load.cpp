// The load generator of `make bench-router`: one thread, epoll, keep-alive connections, as little work as can be.
//
// Sends the same chat over and over, a number in its prompt changed each time. Either every connection sends the next
// request when the last one is answered, or requests are due at random times of a given mean rate; then latency counts
// from when a request was due, so that a slow answer is not hidden by the pause it makes. Every answer must have the
// status 200 and exactly the tokens asked for, told by the tildes in it. Prints one line of JSON.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr size_t kMaxHead = 16384;
const char kEnd[] = "\r\n0\r\n\r\n";
constexpr size_t kEndSize = sizeof(kEnd) - 1;

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

double cpu_s() {
  rusage use;
  getrusage(RUSAGE_SELF, &use);
  return double(use.ru_utime.tv_sec + use.ru_stime.tv_sec) + 1e-6 * double(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(2);
}

struct Options {
  int port = 0;
  int connections = 1;
  double seconds = 0;
  long requests = 0;
  double rate = 0;
  int tokens = 1;
  std::string body_file;
};

struct Connection {
  int fd = -1;
  bool is_busy = false;
  double due_s = 0;
  bool has_first = false;
  std::string head;       // until the body begins
  bool is_in_body = false;
  bool is_chunked = false;
  long left = 0;          // of a body with a length
  std::string tail;       // last bytes of a chunked body
  long tokens = 0;
  int status = 0;
};

class Load {
 public:
  explicit Load(const Options& options) : options_(options), gap_(options.rate > 0 ? options.rate : 1) {
    std::ifstream file(options.body_file);
    std::stringstream text;
    text << file.rdbuf();
    std::string body = text.str();
    message_ = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: " +
               std::to_string(body.size()) + "\r\n\r\n" + body;
    number_at_ = message_.find("00000000");
    if (number_at_ == std::string::npos) {
      std::fprintf(stderr, "the body has no 00000000 to count in\n");
      std::exit(2);
    }
    epoll_ = epoll_create1(0);
    connections_.resize(size_t(options.connections));
    for (auto& c : connections_) open(c);
    if (options.rate > 0) {
      timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.ptr = nullptr;
      epoll_ctl(epoll_, EPOLL_CTL_ADD, timer_, &event);
    }
  }

  void run() {
    start_s_ = now_s();
    const double cpu_before = cpu_s();
    if (options_.rate > 0) {
      next_due_s_ = start_s_ + gap_(random_);
      arm();
    } else {
      for (auto& c : connections_) maybe_send(c, now_s());
    }
    epoll_event events[256];
    while (num_busy_ > 0 || has_more()) {
      const int n = epoll_wait(epoll_, events, 256, 30000);
      if (n < 0 && errno != EINTR) fail("epoll_wait");
      if (n == 0) {
        std::fprintf(stderr, "no answer for 30 s\n");
        std::exit(3);
      }
      for (int i = 0; i < n; ++i) {
        if (events[i].data.ptr == nullptr) {
          on_timer();
        } else {
          on_readable(*static_cast<Connection*>(events[i].data.ptr));
        }
      }
    }
    report(last_end_s_ - start_s_, cpu_s() - cpu_before);
  }

 private:
  bool has_more() const {
    if (options_.rate > 0) return due_left() || !waiting_.empty();
    if (options_.requests > 0) return num_sent_ < options_.requests;
    return now_s() - start_s_ < options_.seconds;
  }

  void open(Connection& c) {
    c.fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(options_.port));
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    if (connect(c.fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) fail("connect");
    const int one = 1;
    setsockopt(c.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(c.fd, F_SETFL, O_NONBLOCK);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &c;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, c.fd, &event);
  }

  void maybe_send(Connection& c, double due_s) {
    if (options_.rate == 0 && !has_more()) return;
    send(c, due_s);
  }

  void send(Connection& c, double due_s) {
    char number[24];
    std::snprintf(number, sizeof number, "%08ld", ++num_sent_ % 100000000);
    std::memcpy(&message_[number_at_], number, 8);
    c.is_busy = true;
    c.is_in_body = c.is_chunked = c.has_first = false;
    c.head.clear();
    c.tail.clear();
    c.tokens = 0;
    c.due_s = due_s;
    ++num_busy_;
    // The request is far smaller than the socket's buffer, which is empty.
    if (::send(c.fd, message_.data(), message_.size(), MSG_NOSIGNAL) != ssize_t(message_.size())) fail("send");
  }

  void on_timer() {
    uint64_t count;
    if (read(timer_, &count, sizeof count) < 0 && errno != EAGAIN) fail("timer");
    const double now = now_s();
    while (next_due_s_ <= now && due_left()) {
      waiting_.push_back(next_due_s_);
      next_due_s_ += gap_(random_);
    }
    for (auto& c : connections_) {
      if (waiting_.empty()) break;
      if (c.is_busy) continue;
      const double due = waiting_.front();
      waiting_.pop_front();
      send(c, due);
    }
    if (due_left()) arm();
  }

  bool due_left() const {
    if (options_.requests > 0) return num_sent_ + long(waiting_.size()) < options_.requests;
    return next_due_s_ - start_s_ < options_.seconds;
  }

  void arm() {
    itimerspec spec{};
    const double seconds = std::floor(next_due_s_);
    spec.it_value.tv_sec = time_t(seconds);
    spec.it_value.tv_nsec = long((next_due_s_ - seconds) * 1e9);
    timerfd_settime(timer_, TFD_TIMER_ABSTIME, &spec, nullptr);
  }

  void on_readable(Connection& c) {
    const ssize_t n = recv(c.fd, buffer_, sizeof buffer_, 0);
    if (n < 0) {
      if (errno == EAGAIN) return;
      fail("recv");
    }
    if (n == 0) {
      if (c.is_busy) ++num_errors_, --num_busy_;
      c.is_busy = false;
      close(c.fd);
      open(c);
      finish(c);
      return;
    }
    if (!c.is_busy) {
      std::fprintf(stderr, "bytes that belong to no request\n");
      std::exit(2);
    }
    take(c, buffer_, size_t(n));
  }

  void take(Connection& c, const char* data, size_t size) {
    if (!c.is_in_body) {
      c.head.append(data, size);
      const size_t end = c.head.find("\r\n\r\n");
      if (end == std::string::npos) {
        if (c.head.size() > kMaxHead) fail("a head without an end");
        return;
      }
      read_head(c, end);
      const std::string rest = c.head.substr(end + 4);
      // An empty chunked body would begin with its end.
      c.tail = "\r\n";
      take_body(c, rest.data(), rest.size());
    } else {
      take_body(c, data, size);
    }
  }

  void read_head(Connection& c, size_t end) {
    std::string head = c.head.substr(0, end);
    std::transform(head.begin(), head.end(), head.begin(), [](unsigned char ch) { return char(std::tolower(ch)); });
    c.status = std::atoi(head.c_str() + 9);
    const size_t length = head.find("\r\ncontent-length:");
    c.is_chunked = length == std::string::npos;
    if (!c.is_chunked) c.left = std::atol(head.c_str() + length + 17);
    c.is_in_body = true;
  }

  void take_body(Connection& c, const char* data, size_t size) {
    const long tokens = std::count(data, data + size, '~');
    c.tokens += tokens;
    if (tokens > 0 && !c.has_first) {
      c.has_first = true;
      first_s_.push_back(float(now_s() - c.due_s));
    }
    bool is_done;
    if (c.is_chunked) {
      if (size >= kEndSize) {
        is_done = std::memcmp(data + size - kEndSize, kEnd, kEndSize) == 0;
        if (!is_done) c.tail.assign(data + size - kEndSize, kEndSize);
      } else {
        c.tail.append(data, size);
        if (c.tail.size() > kEndSize) c.tail.erase(0, c.tail.size() - kEndSize);
        is_done = c.tail.size() == kEndSize && c.tail == kEnd;
      }
    } else {
      c.left -= long(size);
      is_done = c.left <= 0;
    }
    if (is_done) answered(c);
  }

  void answered(Connection& c) {
    last_end_s_ = now_s();
    --num_busy_;
    c.is_busy = false;
    if (c.status != 200 || c.tokens != options_.tokens) {
      if (num_errors_++ == 0) {
        std::fprintf(stderr, "status %d, %ld tokens: %s\n", c.status, c.tokens, c.head.substr(0, 600).c_str());
      }
    } else {
      latencies_s_.push_back(float(last_end_s_ - c.due_s));
      num_tokens_ += c.tokens;
    }
    finish(c);
  }

  void finish(Connection& c) {
    if (options_.rate == 0) {
      maybe_send(c, now_s());
    } else if (!waiting_.empty()) {
      const double due = waiting_.front();
      waiting_.pop_front();
      send(c, due);
    }
  }

  static double at(std::vector<float>& values, double share) {
    if (values.empty()) return 0;
    const size_t index = std::min(values.size() - 1, size_t(share * double(values.size())));
    std::nth_element(values.begin(), values.begin() + long(index), values.end());
    return double(values[index]);
  }

  void report(double wall_s, double used_cpu_s) {
    std::printf(
        "{\"requests\": %zu, \"errors\": %ld, \"tokens\": %ld, \"wall_s\": %.6f, \"cpu_s\": %.6f, \"p50_s\": %.7f, "
        "\"p90_s\": %.7f, \"p99_s\": %.7f, \"max_s\": %.7f, \"first_p50_s\": %.7f, \"first_p99_s\": %.7f}\n",
        latencies_s_.size(), num_errors_, num_tokens_, wall_s, used_cpu_s, at(latencies_s_, 0.5), at(latencies_s_, 0.9),
        at(latencies_s_, 0.99), at(latencies_s_, 1.0), at(first_s_, 0.5), at(first_s_, 0.99));
  }

  Options options_;
  std::string message_;
  size_t number_at_ = 0;
  int epoll_ = -1;
  int timer_ = -1;
  std::vector<Connection> connections_;
  std::deque<double> waiting_;
  std::mt19937_64 random_{1};
  std::exponential_distribution<double> gap_;
  double start_s_ = 0, next_due_s_ = 0, last_end_s_ = 0;
  long num_sent_ = 0, num_busy_ = 0, num_errors_ = 0, num_tokens_ = 0;
  std::vector<float> latencies_s_, first_s_;
  char buffer_[1 << 16];
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const char* value = argv[i + 1];
    if (name == "--port") options.port = std::atoi(value);
    else if (name == "--connections") options.connections = std::atoi(value);
    else if (name == "--seconds") options.seconds = std::atof(value);
    else if (name == "--requests") options.requests = std::atol(value);
    else if (name == "--rate") options.rate = std::atof(value);
    else if (name == "--tokens") options.tokens = std::atoi(value);
    else if (name == "--body") options.body_file = value;
    else { std::fprintf(stderr, "unknown option %s\n", argv[i]); return 2; }
  }
  // Large, so not on the stack.
  static Load load(options);
  load.run();
  return 0;
}
