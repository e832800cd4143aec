// Four warps that gather tiles of 64 rows and those of u beside them: eight threads a line of a row, sixteen rows at a time. What is no row
// or no column becomes zeros. Consumers fence for themselves.
#pragma once
#include <hexa_fx/kernels/low_rank_smem_sm90.cuh>
#include <hexa_fx/ptx/copy_sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct LowRankGatherer {
  static constexpr int kPiece = C::Element::kPiece;
  LowRankSmem<C>& sm;
  const LowRankParams& p;
  Pipe pipe;

  CUTE_DEVICE void run() {
    constexpr int kPasses = kRunRows / 16;
    const int r = threadIdx.x >> 3, c = threadIdx.x & 7;
    const uint32_t first = cast_smem_ptr_to_uint(sm.rows[0][0]) + swizzled(r, c), pieces = p.stride / kPiece;
    int slot = 0;
    for (Run<C::MaxExperts> at(sm.table, p.experts); !at.done(); at.next()) {
      const int row0 = at.row0(), rows = at.rows();
      uint32_t from[kPasses];  // in 16 bytes
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        const uint32_t own = row0 + min(r + 16 * i, rows - 1);
        from[i] = (C::Gather ? __umulhi(2u * uint32_t(__ldg(p.v + own)), p.div_mul) >> p.div_shift : own) * pieces + c;
      }
#pragma unroll 1
      for (int k = 0; k < C::Steps; ++k) {
        Barrier::wait(&sm.empty[pipe.index], pipe.phase ^ 1);
        const uint32_t dst = opaque(first + pipe.index * (2 * C::HalfBytes));
        const int columns = p.N - k * 128 - c * kPiece;
        CUTE_UNROLL
        for (int i = 0; i < kPasses; ++i) {
          const char* row = static_cast<const char*>(p.rows) + size_t(from[i]) * kPieceBytes;
          const uint32_t to = dst + i * (16 * kLineBytes);
          cp_async_16(to, row, r + 16 * i < rows && columns > 0 ? kPieceBytes : 0);
          cp_async_16(to + C::HalfBytes, row + kLineBytes, r + 16 * i < rows && columns > 64 ? kPieceBytes : 0);
          from[i] += 2 * kLineBytes / kPieceBytes;
        }
        if (C::Sums && k == 0) rows_of_u(slot, row0, rows);
        cutlass::arch::cpasync_barrier_arrive_noinc(&sm.full[pipe.index]);
        pipe.template next<C::Stages>();
      }
      slot = slot + 1 >= C::Slots ? 0 : slot + 1;
    }
    cp_async_wait_all();
  }

  CUTE_DEVICE void rows_of_u(int slot, int row0, int rows) {
    constexpr int kPieces = C::Pitch / kPieceBytes;  // a row
    const char* u = static_cast<const char*>(p.u) + C::Element::bytes(size_t(row0) * p.R);
#pragma unroll 1
    for (int at = threadIdx.x; at < kRunRows * kPieces; at += 128) {
      const int row = at / kPieces, piece = at % kPieces;
      const bool inside = row < rows && piece * kPiece < p.R;
      const int from = inside ? row * (p.R / kPiece) + piece : 0;
      const uint32_t to = row * C::Pitch + ((piece ^ (row * C::Pitch / kLineBytes & (kPieces - 1))) << 4);
      cp_async_16(cast_smem_ptr_to_uint(sm.u[slot]) + to, u + from * kPieceBytes, inside ? kPieceBytes : 0);
    }
  }
};

}  // namespace hexa::sm90
